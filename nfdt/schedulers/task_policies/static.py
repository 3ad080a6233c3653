"""Static tasks: equal shares of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nfdt.schedulers.task_policies.dynamic import DynamicTasks
from nfdt.schedulers.throughput import Speeds


class StaticTasks(DynamicTasks):
    """Equal shares for all workers, reserved when the epoch begins."""

    name = "static"
    divides = True

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Return equal shares."""
        return dict.fromkeys(workers, 1.0)

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return the value of the consistency policy."""
        return consistency_alike
