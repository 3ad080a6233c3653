"""Batches that a client streams to a job, with credit-based flow control: the client sends only as many as fit."""

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
    """Queue between the client's Feed stream and the job's run, which are different threads.

    A credit is the right to send one batch of the current epoch. The run sets the total number of batches that the
    epoch may have received (:meth:`allow`); the difference to the announced number is granted.

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
        """Allow ``total`` batches of the epoch altogether; a new epoch drops the remaining batches of the last."""
        with self._changed:
            if epoch != self._epoch:
                self._epoch, self._allowed, self._announced, self._received = epoch, 0, 0, 0
                self._ended = False
                self._batches.clear()
            if total > self._allowed:
                self._allowed = total
                self._changed.notify_all()

    def take(self) -> StreamedBatch | None:
        """Return the next batch of the current epoch, or None when there is none yet.

        Raises:
            JobFailed: the client's iterator raised.
        """
        with self._changed:
            if self._error is not None:
                raise JobFailed(f"The script's data iterator failed: {self._error}")
            return self._batches.popleft() if self._batches else None

    def exhausted(self, epoch: int) -> bool:
        """Return whether the client has ended this epoch and all its batches are taken."""
        with self._changed:
            return self._ended and epoch == self._epoch and not self._batches

    def close(self) -> None:
        """Grant no more credits: the job has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        with self._changed:
            return self._closed

    def offer(self, batch: StreamedBatch) -> None:
        """Queue a batch that the client sent; a batch of a past epoch is dropped.

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
        """Record that the client's iterator has no more batches for this epoch, or raised ``error``."""
        with self._changed:
            if error is not None:
                self._error = error
            elif epoch == self._epoch:
                self._ended = True
        self._news()

    def grant(self, timeout_s: float) -> tuple[int, int] | None:
        """Return (epoch, new credits) to announce; None when the job is over or after ``timeout_s`` without any."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._allowed > self._announced, timeout_s)
            if self._closed or self._allowed <= self._announced:
                return None
            news, self._announced = self._allowed - self._announced, self._allowed
            return self._epoch, news
