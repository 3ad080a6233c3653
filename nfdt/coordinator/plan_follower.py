"""The current plan of a job that is planned from measured speeds during training, and the times of its reviews."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nfdt.coordinator.online_planner import LEAST_STEPS, OnlinePlanner, ShardLoad, follows_a_plan, plan_event
from nfdt.coordinator.speeds import SpeedTracker, batch_sizes
from nfdt.core.specs.job import JobSpec
from nfdt.planning import PlanChoice
from nfdt.schedulers.batch_policies import FixedBatch


class PlanFollower:
    """Plan of a job, reviewed by the online planner once in as many reports as there are workers.

    Args:
        spec: The job.
        tracker: Measured speeds.

    Attributes:
        overlap: Number of pushes that may be unanswered while a worker computes.
    """

    def __init__(self, spec: JobSpec, tracker: SpeedTracker) -> None:
        self._tracker = tracker
        self._planner = _make_planner(spec) if follows_a_plan(spec) else None
        self.overlap = self._planner.preset.overlap if self._planner else spec.algorithm.overlap
        self._reports = 0  # since the last review

    def reported(self) -> None:
        """Count a report of a worker."""
        self._reports += 1

    def is_due(self, workers: int) -> bool:
        """Whether a job with ``workers`` workers reviews its plan now."""
        return self._planner is not None and self._reports >= workers

    def look(self, workers: Sequence[str]) -> dict[str, Any] | None:
        """Return a new decision as the data of an event, or None if nothing changes."""
        self._reports = 0
        if self._planner is None or any(self._tracker.speeds.steps(worker) < LEAST_STEPS for worker in workers):
            return None
        steps = self._tracker.step_times(workers)
        choice = self._planner.look(steps) if steps else None
        if choice is None:
            return None
        self.overlap = choice.preset.overlap
        return plan_event(choice)

    def look_at_groups(
        self, workers: Sequence[str], load: ShardLoad, remaining_s: float, machines: Mapping[str, str] | None = None
    ) -> PlanChoice | None:
        """Return the groups that the job should form; see :meth:`OnlinePlanner.look_at_groups`."""
        if self._planner is None or self._planner.choice is None:
            return None
        steps = self._tracker.step_times(workers)
        if len(steps) < len(workers):
            return None
        return self._planner.look_at_groups(steps, load, remaining_s, machines)

    def renew(self, spec: JobSpec) -> None:
        """Continue without a plan, with the overlap of the specification."""
        self.overlap = spec.algorithm.overlap
        self._planner = None


def _make_planner(spec: JobSpec) -> OnlinePlanner:
    batch = spec.algorithm.batch if batch_sizes(spec) else FixedBatch.name
    return OnlinePlanner(spec.fit.batch_size, spec.algorithm.overlap, batch)
