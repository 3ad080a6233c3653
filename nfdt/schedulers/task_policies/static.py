"""Static tasks: equal shares of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nfdt.schedulers.task_policies.dynamic import DynamicTasks
from nfdt.schedulers.throughput import Speeds


class StaticTasks(DynamicTasks):
    """Every worker gets the same share when the epoch begins."""

    name = "static"
    divides = True

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Equal shares."""
        return dict.fromkeys(workers, 1.0)

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """As the consistency policy says."""
        return consistency_alike
