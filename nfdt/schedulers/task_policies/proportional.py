"""Proportional tasks: shares of an epoch in proportion to measured speeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nfdt.schedulers.task_policies.dynamic import DynamicTasks
from nfdt.schedulers.throughput import Speeds

SURE_STEPS = 10  # steps of each worker before an epoch is divided permanently


class ProportionalTasks(DynamicTasks):
    """Shares in proportion to the speeds of workers, as soon as all speeds are known."""

    name = "proportional"
    divides = True
    depends_on_speed = True

    def shares(
        self, workers: Sequence[str], speeds: Speeds, size_of: Callable[[str], int]
    ) -> Mapping[str, float] | None:
        """Return the samples per second of each worker; None before all speeds are known."""
        if any(speeds.steps(worker) < SURE_STEPS for worker in workers):
            return None
        lines = {worker: speeds.of(worker) for worker in workers}
        return {worker: line.samples_per_s(size_of(worker)) for worker, line in lines.items() if line}

    def waiters_alike(self, consistency_alike: bool) -> bool:
        """Return the value of the consistency policy."""
        return consistency_alike
