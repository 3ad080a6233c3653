"""Measured speeds, and the sizes of batches and leases that follow from them. Time is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.membership import Member
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import TaskTime
from nfdt.schedulers import LeaseBook, Speeds, StepTime, lease_size
from nfdt.schedulers.batch_policies import LocalSizes, find_batch_policy
from nfdt.schedulers.task_policies import DynamicTasks, EpochView, TaskPolicy, make_task_policy

LEASE_S = 0.2
AHEAD_STEPS = 2  # steps of a worker that must be left after its lease, if it requests the next one early


def batch_sizes(spec: JobSpec) -> LocalSizes | None:
    """Return the local batch sizes of a job; None if every batch has the size that ``fit`` gives."""
    if spec.train.kind != "arrays":
        return None
    return find_batch_policy(spec.algorithm.batch).sizes(spec.fit.batch_size, spec.algorithm)


class SpeedTracker:
    """Measured steps of each worker, and the batch sizes of a job that follow from them.

    Args:
        spec: The job.
        sizes: Batch sizes that another part of the job decides; None: the sizes of the job's batch policy.

    Attributes:
        sizes: Batch sizes that differ between workers, if the job has them.
        speeds: Step times of the workers.
    """

    def __init__(self, spec: JobSpec, sizes: LocalSizes | None = None) -> None:
        self.sizes = sizes or batch_sizes(spec)
        self.speeds = Speeds()
        self._reference = spec.fit.batch_size

    def joined(self, worker: str) -> None:
        """Add a worker."""
        if self.sizes:
            self.sizes.joined(worker)

    def left(self, worker: str) -> None:
        """Forget a worker."""
        self.speeds.forget(worker)
        if self.sizes:
            self.sizes.left(worker)

    def stepped(self, worker: str, samples: int, time: TaskTime) -> None:
        """Record the time of a worker's step."""
        self.speeds.measured(worker, samples, time.compute_s + time.exchange_s, time.exchange_s)
        if self.sizes:
            self.sizes.stepped(worker, self.speeds)

    def size_of(self, worker: str) -> int:
        """Return the number of samples of the worker's next step."""
        return self.sizes.of(worker) if self.sizes else self._reference

    def step_times(self, workers: Sequence[str]) -> dict[str, tuple[StepTime, float]]:
        """Return the step time of each measured worker, and the seconds of its step that are not computation."""
        return {w: (line, self.speeds.exchange_s(w)) for w in workers if (line := self.speeds.of(w))}

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue with other batch sizes; None: every batch has the size that ``fit`` gives."""
        self.sizes, self._reference = sizes, spec.fit.batch_size


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
        self._samples_per_s, self._uses = 0.0, 0  # sum over all workers, and its remaining number of uses

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
        reference, total = self._spec.fit.batch_size, self._total_speed(members)
        view = EpochView(members, book, self._tracker.speeds, self._tracker.size_of, reference, now, total)
        return self._tasks.limit(size, member, view)

    def looks_ahead(self, member: Member, steps: int, book: LeaseBook) -> bool:
        """Whether the worker requests its next lease before the last of ``steps`` leased steps ends.

        It thereby commits to a step that it begins later. Near the end of an epoch others may have finished that step
        sooner, and a policy that bounds or synchronises workers decides on finished steps only.
        """
        facts, size = self._policy.facts, self._tracker.size_of(member.name)
        step_s = self._tracker.speeds.step_s(member.name, size)
        if facts.synchronous or facts.bounded or self._spec.train.planned is None or not step_s:
            return False
        left_s = book.remaining * self._spec.fit.batch_size / max(self._samples_per_s, 1e-9)
        return left_s > (steps + AHEAD_STEPS) * step_s

    def step_s(self, member: Member) -> float:
        """Return the expected seconds of the worker's step; 0 before it is measured."""
        return self._tracker.speeds.step_s(member.name, self._tracker.size_of(member.name)) or 0.0

    def _total_speed(self, members: Sequence[Member]) -> float:
        """Return the sum of all workers' speeds, computed once for as many leases as there are workers."""
        if self._uses <= 0:
            speeds, size_of = self._tracker.speeds, self._tracker.size_of
            lines = {m.name: line for m in members if (line := speeds.now(m.name))}
            self._samples_per_s = sum(line.samples_per_s(size_of(name)) for name, line in lines.items())
            self._uses = len(members)
        self._uses -= 1
        return self._samples_per_s

    def renew(self, spec: JobSpec) -> None:
        """Continue with the batch size of another specification; the task policy stays."""
        self._spec = spec
