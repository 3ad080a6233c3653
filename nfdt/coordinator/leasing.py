"""Sizes of leases: the limits of the task policy, of the consistency policy and of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.membership import Member
from nfdt.coordinator.speeds import SpeedTracker
from nfdt.core.specs.job import JobSpec
from nfdt.schedulers import LeaseBook, lease_size
from nfdt.schedulers.task_policies import DynamicTasks, EpochView, TaskPolicy, make_task_policy

LEASE_S = 0.2


def stream_warning(spec: JobSpec) -> str | None:
    """Return a warning for options that have no effect on streamed data, or None."""
    algorithm = spec.algorithm
    if spec.train.sized:
        return None
    if algorithm.batch_facts.follows_speed:
        return f"batch={algorithm.batch!r}: the data come in whole batches; they keep the size they come in."
    if spec.train.planned is None and make_task_policy(algorithm.tasks).depends_on_speed:
        return f"tasks={algorithm.tasks!r}: the client feeds the batches one by one; they are handed out as they come."
    return None


class LeaseSizer:
    """Source of the shares of an epoch and the size of each lease.

    Args:
        spec: The job.
        policy: Consistency policy.
        tracker: Measured speeds.
    """

    def __init__(self, spec: JobSpec, policy: ConsistencyPolicy, tracker: SpeedTracker) -> None:
        self._spec, self._policy, self._tracker = spec, policy, tracker
        known = spec.train.planned is not None and not policy.facts.synchronous  # rows, and the worker of each
        self._tasks: TaskPolicy = make_task_policy(spec.algorithm.tasks) if known else DynamicTasks()

    @property
    def divides(self) -> bool:
        """Whether the task policy gives each worker its part of an epoch."""
        return self._tasks.divides

    def shares(self, workers: Sequence[str]) -> Mapping[str, float] | None:
        """Return the part of an epoch that each worker computes; None: there are no shares, or not yet."""
        return self._tasks.shares(workers, self._tracker.speeds, self._tracker.size_of)

    def size(self, member: Member, members: Sequence[Member], book: LeaseBook, now: float) -> int:
        """Return the number of tasks that the worker gets now; 0: it waits, because others finish the rest sooner."""
        if self._spec.train.planned is None or self._policy.lease_limit is not None:
            size = self._policy.lease_limit or 1
        else:
            step_s = self._tracker.speeds.step_s(member.name, self._tracker.size_of(member.name))
            # Sources read ahead within a lease; what exceeds the time limit is returned and leased again.
            target_s = LEASE_S if self._spec.train.sized else 2 * LEASE_S
            size = lease_size(book.remaining, len(members), step_s, target_s=target_s)
        reference = self._spec.fit.batch_size
        view = EpochView(members, book, self._tracker.speeds, self._tracker.size_of, reference, now)
        return self._tasks.limit(size, member, view)

    def renew(self, spec: JobSpec) -> None:
        """Continue with the batch size of another specification; the task policy stays."""
        self._spec = spec
