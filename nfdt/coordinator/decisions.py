"""The distribution of a job's work: sizes of leases, the plan, and what a job is warned of. Time is passed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.membership import Member, Membership
from nfdt.coordinator.online_planner import OnlinePlanner, ShardLoad, follows_a_plan, plan_event
from nfdt.coordinator.speed_tracker import SpeedTracker, batch_sizes
from nfdt.core.specs.job import JobSpec
from nfdt.planning.cost_model import PlanChoice
from nfdt.schedulers.batch_policies import FixedBatch, LocalSizes
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.local_steps import FIRST_STEPS, LEAST_ROUNDS, LocalStepSizes
from nfdt.schedulers.task_policies import DynamicTasks, EpochView, TaskPolicy, make_task_policy
from nfdt.schedulers.throughput import StepTime, lease_size

LEASE_S = 0.2
LEASES_PER_S = 1000  # of all workers together: with more of them, leases last longer
MOST_TASKS = 64  # of a lease that lasts LEASE_S
AHEAD_STEPS = 2  # steps of a worker that must be left after its lease, if it requests the next one early
LEAST_EXCHANGE_S, LEAST_EXCHANGE_SHARE = 0.05, 0.5  # of a step, from which on links are called slow


def lease_s(workers: int) -> float:
    """Return the seconds for which a job of so many workers leases tasks at once, unless its tail is divided."""
    return max(LEASE_S, workers / LEASES_PER_S)


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


def slow_exchange(spec: JobSpec, steps: Mapping[str, tuple[StepTime, float]]) -> tuple[float, float] | None:
    """Return the seconds of an exchange and of a whole step, if workers mostly exchange after every step; else None.

    ``steps``: as :meth:`SpeedTracker.step_times` returns it.
    """
    algorithm, batch = spec.algorithm, spec.fit.batch_size
    every_step = algorithm.topology_facts.flat and not algorithm.exchange_facts.local
    if not (every_step and algorithm.consistency_facts.independent):
        return None
    whole = median(line.seconds(batch) for line, _ in steps.values())
    exchange = min(whole, median(seconds for _, seconds in steps.values()))
    return (exchange, whole) if exchange >= max(LEAST_EXCHANGE_S, LEAST_EXCHANGE_SHARE * whole) else None


def rounds_of(spec: JobSpec, sizes: LocalSizes | None) -> float | None:
    """Return the pushes of each worker in a whole training with local steps; None for others, or if not known yet."""
    if not isinstance(sizes, LocalStepSizes) or spec.cluster.workers == 1:
        return None
    per_epoch = spec.train.planned or 0
    if spec.fit.steps_per_epoch is not None:
        per_epoch = spec.fit.steps_per_epoch * sizes.reference
    return sizes.rounds(per_epoch * spec.fit.epochs)


class LeaseSizer:
    """Source of the shares of an epoch and the size of each lease.

    Args:
        spec: The job.
        policy: Consistency policy.
        tracker: Measured speeds.

    Attributes:
        backs_up: Whether workers that have nothing left take the tasks of late ones.
    """

    def __init__(self, spec: JobSpec, policy: ConsistencyPolicy, tracker: SpeedTracker) -> None:
        self._spec, self._policy, self._tracker = spec, policy, tracker
        known = spec.train.planned is not None and not policy.facts.synchronous  # rows, and the worker of each
        self._tasks: TaskPolicy = make_task_policy(spec.algorithm.tasks) if known else DynamicTasks()
        facts = policy.facts
        # Groups divide a batch as they are; and a policy that bounds workers counts the steps that each has begun.
        self.backs_up = spec.algorithm.topology_facts.flat and not (facts.synchronous or facts.bounded)
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
            size = self._policy.lease_limit or self._unplanned_steps or 1
        else:
            # Sources read ahead within a lease; what exceeds the time limit is returned and leased again.
            target_s = lease_s(len(members)) * (1 if self._spec.train.sized else 2)
            size = self._fitting(member, members, book.remaining, target_s)
        reference, total = self._spec.fit.batch_size, self._total_speed(members)
        view = EpochView(members, book, self._tracker.speeds, self._tracker.size_of, reference, now, total)
        return self._tasks.limit(size, member, view)

    @property
    def _unplanned_steps(self) -> int | None:
        """Steps between two exchanges where batches are leased one by one; None: each is exchanged."""
        algorithm = self._spec.algorithm
        if self._spec.train.planned is not None or not algorithm.exchange_facts.local:
            return None
        return FIRST_STEPS if algorithm.local_steps == "auto" else algorithm.local_steps

    def size_of_rest(self, member: Member, members: Sequence[Member], rest: int) -> int:
        """Return the number of tasks that the worker gets of the ``rest`` of an epoch, which others compute, too."""
        return self._fitting(member, members, rest, lease_s(len(members)))

    def _fitting(self, member: Member, members: Sequence[Member], rest: int, target_s: float) -> int:
        most = round(MOST_TASKS * max(1.0, target_s / (2 * LEASE_S)))
        return lease_size(rest, len(members), self._tracker.step_s(member.name), target_s=target_s, most=most)

    def looks_ahead(self, member: Member, steps: int, book: LeaseBook) -> bool:
        """Whether the worker requests its next lease before the last of ``steps`` leased steps ends.

        It thereby commits to a step that it begins later. Near the end of an epoch others may have finished that step
        sooner, and a policy that bounds or synchronises workers decides on finished steps only.
        """
        facts, step_s = self._policy.facts, self._tracker.step_s(member.name)
        if facts.synchronous or facts.bounded or self._spec.train.planned is None or not step_s:
            return False
        left_s = book.remaining * self._spec.fit.batch_size / max(self._samples_per_s, 1e-9)
        return left_s > (steps + AHEAD_STEPS) * step_s

    def _total_speed(self, members: Sequence[Member]) -> float:
        """Return the sum of all workers' speeds, computed once for as many leases as there are workers."""
        if self._uses <= 0:
            speeds, size_of = self._tracker.speeds, self._tracker.size_of
            lines = {m.name: line for m in members if (line := speeds.of(m.name).now)}
            self._samples_per_s = sum(line.samples_per_s(size_of(name)) for name, line in lines.items())
            self._uses = len(members)
        self._uses -= 1
        return self._samples_per_s

    def renew(self, spec: JobSpec) -> None:
        """Continue with the batch size of another specification; the task policy stays."""
        self._spec = spec


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
        self._planner: OnlinePlanner | None = None
        self.overlap = spec.algorithm.overlap
        if follows_a_plan(spec):
            batch = spec.algorithm.batch if batch_sizes(spec) else FixedBatch.name
            self._planner = OnlinePlanner(spec.fit.batch_size, self.overlap, batch)
            self.overlap = self._planner.preset.overlap
        self._reports = 0  # since the last review

    def reported(self, workers: int) -> bool:
        """Count a report of a worker; return whether a job of so many workers reviews its plan now."""
        self._reports += 1
        return self._planner is not None and self._reports >= workers

    def look(self, workers: Sequence[str]) -> dict[str, Any] | None:
        """Return a new decision as the data of an event, or None if nothing changes."""
        self._reports = 0
        if self._planner is None or not self._tracker.are_measured(workers):
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


class Decisions:
    """The parts of one job that distribute its work.

    Args:
        spec: The job.
        policy: Consistency policy.
        sizes: Batch sizes that another part of the job decides; None: the sizes of the job's batch policy.

    Attributes:
        policy: Consistency policy: which workers may proceed.
        speeds: Measured speeds and batch sizes.
        leases: Shares of epochs and sizes of leases.
        plan: Plan chosen during training.
    """

    def __init__(self, spec: JobSpec, policy: ConsistencyPolicy, sizes: LocalSizes | None = None) -> None:
        self.policy, self.speeds = policy, SpeedTracker(spec, sizes)
        self.leases, self.plan = LeaseSizer(spec, policy, self.speeds), PlanFollower(spec, self.speeds)
        self._spec, self._links_judged, self._rounds_judged = spec, False, False

    def joined(self, worker: str) -> None:
        """Add a worker that is ready."""
        self.policy.joined(worker)
        self.speeds.joined(worker)

    def left(self, worker: str) -> None:
        """Remove a lost worker."""
        self.policy.left(worker)
        self.speeds.left(worker)

    def changes(self, members: Membership, now: float) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events that follow from a report of a worker: kind and data of changed speeds and of a new plan."""
        yield from self._judge_rounds()
        if self.speeds.throttle.is_due(now, len(members)):
            names = members.ready_names()
            if speeds := self.speeds.report(names):
                yield "speed", {"workers": speeds}
            yield from self._judge_links(names)
        if self.plan.reported(len(members)) and (decision := self.plan.look(members.ready_names())):
            yield "plan", decision

    def _judge_links(self, workers: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a warning about slow links, once all workers are measured and only then; see :meth:`changes`."""
        if self._links_judged or not self.speeds.are_measured(workers):
            return
        self._links_judged = True
        if (slow := slow_exchange(self._spec, self.speeds.step_times(workers))) is None:
            return
        exchange_s, step_s = slow
        text = (
            f"Exchanges take {exchange_s:.2g} of the {step_s:.2g} s of a step. algorithm='local-ddc' exchanges only "
            "after several steps, and codec='adaptive' sends fewer bytes: docs/slow_links.md."
        )
        yield "log", {"worker": None, "level": "warning", "text": text}

    def _judge_rounds(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a warning about too few exchanges, once all workers are measured and only then; see :meth:`changes`."""
        sizes = self.speeds.sizes
        if sizes is None or self._rounds_judged or (rounds := rounds_of(self._spec, sizes)) is None:
            return
        self._rounds_judged = True
        if rounds >= LEAST_ROUNDS:
            return
        text = (
            f"local_steps={sizes.round_steps}: each worker exchanges about {rounds:.2g} times in this training. "
            f"With fewer than {LEAST_ROUNDS} exchanges the model may become less accurate than on one machine. "
            "Remedy: fewer local steps, more epochs or fewer workers (docs/slow_links.md)."
        )
        yield "log", {"worker": None, "level": "warning", "text": text}

    def slow_links(self, workers: Sequence[str], load: ShardLoad) -> dict[str, float] | None:
        """Return the seconds of an exchange and of a whole step, if this job plans and its workers wait for links.

        ``load``: That of the busiest shard; what workers wait for a shard is not the link's.
        """
        if self._spec.algorithm.plan != "topology" or not self.speeds.are_measured(workers):
            return None
        shard_s, steps = load.busy_s + load.wait_s, self.speeds.step_times(workers)
        of_links = {worker: (line, max(0.0, seconds - shard_s)) for worker, (line, seconds) in steps.items()}
        slow = slow_exchange(self._spec, of_links)
        return None if slow is None else {"exchange_s": slow[0], "step_s": slow[1]}

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue between two epochs with other workers and another preset."""
        self._spec = spec
        self.speeds.renew(spec, sizes)
        self.leases.renew(spec)
        self.plan.renew(spec)
