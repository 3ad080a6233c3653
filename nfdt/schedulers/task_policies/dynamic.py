"""Dynamic tasks: workers lease small pieces of one pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nfdt.schedulers.task_policies.base import EpochView, LeaseHolder
from nfdt.schedulers.throughput import Speeds


class DynamicTasks:
    """One pool from which all workers take tasks until it is empty."""

    name = "dynamic"
    divides = False
    ends_together = False
    depends_on_speed = False

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Return None: no task is reserved."""
        return None

    def limit(self, size: int, worker: LeaseHolder, epoch: EpochView) -> int:
        """Return the whole lease."""
        return size

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return True: all workers wait for the same pool."""
        return True
