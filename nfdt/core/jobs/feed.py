"""Batches that a client streams to a job. Credits keep it from sending more than there is room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire.chunks import split

MAX_BATCH_BYTES = 2**30
"""Largest encoded batch."""


@dataclass(frozen=True)
class StreamedBatch:
    """One encoded batch of one epoch; ``step`` counts from 0 within the epoch."""

    epoch: int
    step: int
    samples: int
    data: bytes


def pieces(batch: StreamedBatch) -> Iterator[pb.FedBatch]:
    """Yield the messages that carry a batch, in order."""
    for part in split(len(batch.data)):
        piece = batch.data[part]
        total = len(batch.data)
        yield pb.FedBatch(
            epoch=batch.epoch, step=batch.step, samples=batch.samples, total_bytes=total, offset=part.start, data=piece
        )


class BatchAssembly:
    """Joins the pieces of batches, one batch after the other.

    Args:
        await_room: Called with epoch and size in bytes before a batch is joined; returns when there is room for it.
    """

    def __init__(self, await_room: Callable[[int, int], None]) -> None:
        self._await_room = await_room
        self._parts: list[bytes] = []
        self._received = self._total = 0

    def add(self, piece: pb.FedBatch) -> StreamedBatch | None:
        """Add the next piece; return the batch if it is now complete, else None.

        Raises:
            ProtocolError: The batch is too large, or the piece is not the next one.
        """
        if not self._received:
            if not 0 < piece.total_bytes <= MAX_BATCH_BYTES:
                raise ProtocolError(
                    f"Feed: expected a batch of at most {MAX_BATCH_BYTES} bytes. Received: {piece.total_bytes} bytes."
                )
            self._total = piece.total_bytes
            # Waiting here holds up the stream, and gRPC's flow control then stops the client.
            self._await_room(piece.epoch, self._total)
        stop = piece.offset + len(piece.data)
        if piece.offset != self._received or not piece.data or stop > self._total:
            raise ProtocolError(
                f"Feed: expected bytes from {self._received} up to {self._total}. Received: {piece.offset} to {stop}."
            )
        self._parts.append(piece.data)
        self._received = stop
        if stop < self._total:
            return None
        data, self._parts, self._received = b"".join(self._parts), [], 0
        return StreamedBatch(piece.epoch, piece.step, piece.samples, data)


class BatchFeed(Protocol):
    """Accepts the batches that a client streams to a job.

    A credit is the right to send one batch of the current epoch.
    """

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""

    def open(self) -> int:
        """Start accepting batches of a new client, and only of it; return its number."""

    def await_room(self, client: int, epoch: int, size: int) -> None:
        """Wait until a batch of ``size`` bytes fits, or is not needed any more."""

    def offer(self, client: int, batch: StreamedBatch) -> None:
        """Accept a batch of the newest client; drop one of another client or of an epoch that is over.

        Raises:
            ProtocolError: The client had no credit for it.
        """

    def end(self, epoch: int, error: str | None = None) -> None:
        """Record that the client's iterator has no more batches for this epoch, or raised."""

    def grant(self, timeout_s: float) -> pb.FeedCredit | None:
        """Return new credits to announce; None when the job is over or after ``timeout_s`` without any."""
