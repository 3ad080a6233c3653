"""The parts of a job that distribute its work: consistency, speeds, leases and plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.leasing import LeaseSizer
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.plan_follower import PlanFollower
from nfdt.coordinator.speed_report import SpeedReport
from nfdt.coordinator.speeds import SpeedTracker
from nfdt.core.specs.job import JobSpec
from nfdt.schedulers.batch_policies import LocalSizes


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
