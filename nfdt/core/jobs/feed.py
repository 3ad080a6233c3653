"""Batches that a client feeds to a job, with credits: the client never sends more than there is room for."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from nfdt.core.errors import JobFailed, ProtocolError


@dataclass(frozen=True)
class Batch:
    """One encoded batch of one epoch; ``step`` counts from 0 within the epoch."""

    epoch: int
    step: int
    samples: int
    data: bytes


class FeedQueue:
    """Between the client's Feed stream and the job's run; both sides may be different threads.

    A credit is the right to send one batch of the current epoch. Credits are granted when an epoch
    begins (``capacity`` of them) and one more for each batch that is taken.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._epoch: int | None = None
        self._batches: deque[Batch] = deque()
        self._unsent = 0  # credits granted but not announced yet
        self._credits = 0  # credits announced and not used
        self._ended = False
        self._error: str | None = None
        self._closed = False

    def begin(self, epoch: int, capacity: int) -> None:
        """Open an epoch: what is left of another one is dropped."""
        with self._changed:
            self._epoch, self._unsent, self._credits, self._ended = epoch, capacity, 0, False
            self._batches.clear()
            self._changed.notify_all()

    def take(self) -> Batch | None:
        """The next batch of the current epoch; None when there is none yet.

        Raises:
            JobFailed: the client's iterator raised.
        """
        with self._changed:
            if self._error is not None:
                raise JobFailed(f"The script's data iterator failed: {self._error}")
            if not self._batches:
                return None
            self._unsent += 1
            self._changed.notify_all()
            return self._batches.popleft()

    @property
    def exhausted(self) -> bool:
        """Whether the client has said that the epoch has no more batches, and all are taken."""
        with self._changed:
            return self._ended and not self._batches

    def close(self) -> None:
        """The job has ended: no more credits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def offer(self, batch: Batch) -> None:
        """Keep a batch that the client sent; one of an epoch that is over is dropped.

        Raises:
            ProtocolError: the client had no credit for it.
        """
        with self._changed:
            if batch.epoch != self._epoch or self._ended:
                return
            if self._credits < 1:
                raise ProtocolError(f"Feed: batch {batch.step} of epoch {batch.epoch} came without a credit.")
            self._credits -= 1
            self._batches.append(batch)
            self._changed.notify_all()

    def end(self, epoch: int, error: str | None = None) -> None:
        """The client's iterator has no more batches for this epoch, or raised."""
        with self._changed:
            if error is not None:
                self._error = error
            elif epoch == self._epoch:
                self._ended = True
            self._changed.notify_all()

    def grant(self, timeout_s: float) -> tuple[int, int] | None:
        """(epoch, new credits) to announce; None when the job is over or after ``timeout_s`` without news."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._unsent > 0, timeout_s)
            if self._closed or self._unsent == 0 or self._epoch is None:
                return None
            news, self._unsent = self._unsent, 0
            self._credits += news
            return self._epoch, news

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        with self._changed:
            return self._closed

    def wait_for_news(self, timeout_s: float) -> None:
        """Return when a batch, an end or an error has arrived, or after ``timeout_s``."""
        with self._changed:
            news = lambda: bool(self._batches) or self._ended or self._error is not None or self._closed  # noqa: E731
            self._changed.wait_for(news, timeout_s)
