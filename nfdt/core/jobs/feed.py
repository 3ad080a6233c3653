"""Batches that a client feeds to a job, with credits: the client never sends more than there is room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nfdt.core.wire import jobs_pb2 as pb


@dataclass(frozen=True)
class StreamedBatch:
    """One encoded batch of one epoch; ``step`` counts from 0 within the epoch."""

    epoch: int
    step: int
    samples: int
    data: bytes


class BatchFeed(Protocol):
    """Entry of a job for the batches of its client.

    A credit is the right to send one batch of the current epoch.
    """

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        ...

    def open(self) -> None:
        """Begin with a client, which may be another one than before."""
        ...

    def offer(self, batch: StreamedBatch) -> None:
        """Accept a batch of the client; drop one of an epoch that is over.

        Raises:
            ProtocolError: The client had no credit for it.
        """
        ...

    def end(self, epoch: int, error: str | None = None) -> None:
        """Record that the client's iterator has no more batches for this epoch, or raised."""
        ...

    def grant(self, timeout_s: float) -> pb.FeedCredit | None:
        """Return new credits to announce; None when the job is over or after ``timeout_s`` without any."""
        ...
