"""Proportional tasks: shares of an epoch in proportion to measured speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nfdt.schedulers.task_policies.dynamic import DynamicTasks
from nfdt.schedulers.throughput import Speeds

SURE_STEPS = 10  # of each worker, before an epoch is divided for good


class ProportionalTasks(DynamicTasks):
    """Every worker gets a share in proportion to its speed, once all speeds are known."""

    name = "proportional"
    divides = True
    depends_on_speed = True

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Samples per second of each worker."""
        if any(speeds.steps(worker) < SURE_STEPS for worker in workers):
            return None
        lines = {worker: speeds.of(worker) for worker in workers}
        return {worker: line.samples_per_s(size_of(worker)) for worker, line in lines.items() if line}

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """As the consistency policy says."""
        return consistency_alike
