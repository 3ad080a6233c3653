"""The parts of a job that distribute its work: consistency, speeds, leases and plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.leasing import LeaseSizer, SpeedTracker, batch_sizes
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.online_planner import LEAST_STEPS, OnlinePlanner, ShardLoad, follows_a_plan, plan_event
from nfdt.coordinator.progress import Throttle
from nfdt.core.specs.job import JobSpec
from nfdt.planning.cost_model import PlanChoice
from nfdt.schedulers.batch_policies import FixedBatch, LocalSizes

REPORT_EVERY_S = 1.0
CHANGED = 0.1  # a speed that changed by a smaller fraction is not reported again


class SpeedReport:
    """Description of workers' speeds, with those that were reported last.

    Args:
        tracker: Measured speeds.
    """

    def __init__(self, tracker: SpeedTracker) -> None:
        self._tracker = tracker
        self._throttle = Throttle(REPORT_EVERY_S)
        self._described: dict[str, dict[str, Any]] = {}
        self._reported: dict[str, dict[str, Any]] = {}

    @property
    def described(self) -> dict[str, dict[str, Any]]:
        """The last description of each worker, including lost ones."""
        return dict(self._described)

    def describe(self, workers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Describe the speed of each of these workers that is measured."""
        for worker in workers:
            size, speeds = self._tracker.size_of(worker), self._tracker.speeds
            if line := speeds.of(worker):
                self._described[worker] = {
                    "samples_per_s": round(line.samples_per_s(size), 3),
                    "step_s": round(line.seconds(size), 6),
                    "step_exchange_s": round(speeds.exchange_s(worker), 6),
                    "batch_size": size,
                }
        return {worker: self._described[worker] for worker in workers if worker in self._described}

    def is_due(self, now: float) -> bool:
        """Whether the last check is at least a second ago."""
        return self._throttle.is_due(now)

    def look(self, workers: Sequence[str], now: float) -> dict[str, dict[str, Any]] | None:
        """Return the speeds of these workers if one of them has changed since the last report, else None."""
        self._throttle.restart(now)
        described = self.describe(workers)
        if not any(self._has_changed(worker, entry) for worker, entry in described.items()):
            return None
        self._reported = described
        return described

    def _has_changed(self, worker: str, entry: dict[str, Any]) -> bool:
        last = self._reported.get(worker)
        if last is None or last["batch_size"] != entry["batch_size"]:
            return True
        return bool(abs(entry["samples_per_s"] - last["samples_per_s"]) > CHANGED * last["samples_per_s"])


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


@dataclass(frozen=True)
class Decisions:
    """The parts of one job that distribute its work.

    Attributes:
        policy: Consistency policy: which workers may proceed.
        speeds: Measured speeds and batch sizes.
        leases: Shares of epochs and sizes of leases.
        report: Speeds as event data.
        plan: Plan chosen during training.
    """

    policy: ConsistencyPolicy
    speeds: SpeedTracker
    leases: LeaseSizer
    report: SpeedReport
    plan: PlanFollower

    @classmethod
    def of(cls, spec: JobSpec, policy: ConsistencyPolicy, sizes: LocalSizes | None = None) -> Decisions:
        """Build the parts of a job; ``sizes`` as in :class:`SpeedTracker`."""
        speeds = SpeedTracker(spec, sizes)
        return cls(policy, speeds, LeaseSizer(spec, policy, speeds), SpeedReport(speeds), PlanFollower(spec, speeds))

    def joined(self, worker: str) -> None:
        """Add a worker that is ready."""
        self.policy.joined(worker)
        self.speeds.joined(worker)

    def left(self, worker: str) -> None:
        """Forget a worker."""
        self.policy.left(worker)
        self.speeds.left(worker)

    def changes(self, members: Membership, now: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events that follow from a report of a worker: kind and data of changed speeds and of a new plan."""
        if self.report.is_due(now) and (speeds := self.report.look(members.ready_names(), now)):
            yield "speed", {"workers": speeds}
        self.plan.reported()
        if self.plan.is_due(len(members)) and (decision := self.plan.look(members.ready_names())):
            yield "plan", decision

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue between two epochs with other workers and another preset."""
        self.speeds.renew(spec, sizes)
        self.leases.renew(spec)
        self.plan.renew(spec)
