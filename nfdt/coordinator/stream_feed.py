"""The batches that a client feeds to the epochs of a job."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.core.errors import ProtocolError
from nfdt.schedulers.sources import FedTasks

MOST_BYTES = 2**30
"""Largest amount of batches that a job keeps: those that wait, are computed, or that no snapshot of the shards has."""


@dataclass(frozen=True)
class FeedCredit:
    """Total number of batches of ``epoch`` that the client may send, and the number of batches still free."""

    epoch: int
    total: int
    free: int


class StreamFeed:
    """The queue of fed batches of the current epoch.

    Args:
        planner: Creates the queue of each epoch.

    Attributes:
        tasks: The queue; None for data that are no stream.
        full: Whether the last batch that the client has announced had no room.
    """

    def __init__(self, planner: EpochPlanner) -> None:
        self._planner = planner
        self.tasks: FedTasks | None = planner.next_feed()
        self.full = False

    def has_room(self, size: int, settled: int) -> bool:
        """Whether a batch of ``size`` bytes fits beside those that are kept; a single one always does.

        Args:
            size: Size of the batch in bytes.
            settled: Bytes of the epoch's batches that are no longer kept.
        """
        kept = self.tasks.accepted_bytes - settled if self.tasks is not None else 0
        self.full = 0 < kept and kept + size > MOST_BYTES
        return not self.full

    def wants_settled(self, unsettled: int) -> bool:
        """Whether a batch had no room, and there would be much if these bytes were settled."""
        return self.full and unsettled > MOST_BYTES // 4

    def add(self, epoch: int, data: bytes, samples: int) -> None:
        """Queue one more batch of this epoch, the current one.

        Raises:
            ProtocolError: The client sent more batches than it had credit for.
        """
        credit = self.credit(epoch)
        if credit.free < 1:
            raise ProtocolError(
                f"Feed of epoch {epoch}: expected at most {credit.total} batches by now. "
                "Received one more. The client must wait for credit."
            )
        if self.tasks is not None:
            self.tasks.feed(data, samples)

    def credit(self, epoch: int) -> FeedCredit:
        """Return the credit for this epoch, the current one; zero if the data are no stream."""
        if self.tasks is None:
            return FeedCredit(epoch, 0, 0)
        capacity = 2 * max(self._planner.spec.cluster.workers, self.tasks.parts) + 2
        free = max(0, capacity - self.tasks.remaining)
        return FeedCredit(epoch, self.tasks.accepted + free, free)

    def next_epoch(self) -> None:
        """Begin the queue of the next epoch."""
        self.tasks = self._planner.next_feed(self.tasks)
        self.full = False
