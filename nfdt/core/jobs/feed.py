"""Batches that a client feeds to a job, with credits: the client never sends more than there is room for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nfdt.core.errors import JobFailed, ProtocolError


@dataclass(frozen=True)
class StreamedBatch:
    """One encoded batch of one epoch; ``step`` counts from 0 within the epoch."""

    epoch: int
    step: int
    samples: int
    data: bytes


class FeedQueue:
    """Between the client's Feed stream and the job's run, which are different threads.

    A credit is the right to send one batch of the current epoch. The run says how many batches the
    epoch may have received in all (:meth:`allow`); the difference to what was announced is granted.

    Args:
        news: Called, without a lock, when the client has sent something.
    """

    def __init__(self, news: Callable[[], None] = lambda: None) -> None:
        self._news = news
        self._changed = threading.Condition()
        self._epoch = -1
        self._allowed = self._announced = self._received = 0
        self._batches: deque[StreamedBatch] = deque()
        self._ended = False
        self._error: str | None = None
        self._closed = False

    def allow(self, epoch: int, total: int) -> None:
        """The epoch may have received ``total`` batches in all; another epoch drops what is left of the last."""
        with self._changed:
            if epoch != self._epoch:
                self._epoch, self._allowed, self._announced, self._received = epoch, 0, 0, 0
                self._ended = False
                self._batches.clear()
            if total > self._allowed:
                self._allowed = total
                self._changed.notify_all()

    def take(self) -> StreamedBatch | None:
        """The next batch of the current epoch; None when there is none yet.

        Raises:
            JobFailed: the client's iterator raised.
        """
        with self._changed:
            if self._error is not None:
                raise JobFailed(f"The script's data iterator failed: {self._error}")
            return self._batches.popleft() if self._batches else None

    def exhausted(self, epoch: int) -> bool:
        """Whether the client has said that this epoch has no more batches, and all are taken."""
        with self._changed:
            return self._ended and epoch == self._epoch and not self._batches

    def close(self) -> None:
        """The job has ended: no more credits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        with self._changed:
            return self._closed

    def offer(self, batch: StreamedBatch) -> None:
        """Keep a batch that the client sent; one of an epoch that is over is dropped.

        Raises:
            ProtocolError: the client had no credit for it.
        """
        with self._changed:
            if batch.epoch != self._epoch or self._ended or self._closed:
                return
            if self._received >= self._announced:
                raise ProtocolError(
                    f"Feed: expected at most {self._announced} batches of epoch {batch.epoch} by now. "
                    "Received one more. The client must wait for credit."
                )
            self._received += 1
            self._batches.append(batch)
        self._news()

    def end(self, epoch: int, error: str | None = None) -> None:
        """The client's iterator has no more batches for this epoch, or raised."""
        with self._changed:
            if error is not None:
                self._error = error
            elif epoch == self._epoch:
                self._ended = True
        self._news()

    def grant(self, timeout_s: float) -> tuple[int, int] | None:
        """(epoch, new credits) to announce; None when the job is over or after ``timeout_s`` without any."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._allowed > self._announced, timeout_s)
            if self._closed or self._allowed <= self._announced:
                return None
            news, self._announced = self._allowed - self._announced, self._allowed
            return self._epoch, news
