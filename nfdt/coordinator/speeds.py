"""How fast the workers of a job are, and what follows from it: batch sizes, shares, leases. Time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.membership import Member
from nfdt.coordinator.online_planner import LEAST_STEPS, Autopilot, ShardLoad, follows_a_plan, told
from nfdt.coordinator.progress import Throttle
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import TaskTime
from nfdt.planning import Choice
from nfdt.schedulers import BatchSizes, Bounds, LeaseBook, Runner, Speeds, StepTime, lease_size, steps_to_share
from nfdt.schedulers.group_shares import StatedSizes

TELL_EVERY_S = 1.0
SURE_STEPS = 10  # of each worker, before an epoch is divided for good
STALE_STEPS = 20  # after so many of its own step times a speed is measured again, whatever it was
NEWS = 0.1  # a speed that moved less than this share is not told again


Sizes = BatchSizes | StatedSizes


def batch_sizes(spec: JobSpec) -> BatchSizes | None:
    """The dynamic batch sizes of a job; None where every batch has the size that ``fit`` gives."""
    algorithm = spec.algorithm
    if algorithm.batch != "dbs" or spec.train.kind != "arrays":
        return None
    bounds = Bounds(algorithm.batch_min, algorithm.batch_max, algorithm.batch_multiple)
    return BatchSizes(spec.fit.batch_size, bounds)


def told_of_streams(spec: JobSpec) -> str | None:
    """What a job that is fed batch by batch cannot have of what was asked for; None where that is nothing."""
    algorithm = spec.algorithm
    if spec.train.kind == "arrays":
        return None
    if algorithm.batch == "dbs":
        return "batch='dbs': the client feeds the batches one by one; they keep the size they come in."
    if algorithm.tasks in ("proportional", "finish-together"):
        return f"tasks={algorithm.tasks!r}: the client feeds the batches one by one; they are handed out as they come."
    return None


class Pace:
    """The measured speeds of one job's workers, and the decisions that rest on them.

    Args:
        spec: The job.
        policy: Who may proceed.
        sizes: Batch sizes that are stated; None: as the job's batch policy says.

    Attributes:
        sizes: Dynamic batch sizes, if the job has them.
        overlap: Pushes that may be unanswered while a worker computes.
    """

    def __init__(self, spec: JobSpec, policy: ConsistencyPolicy, sizes: StatedSizes | None = None) -> None:
        self.sizes: Sizes | None = sizes or batch_sizes(spec)
        self._spec, self._policy = spec, policy
        self._speeds = Speeds()
        self._autopilot = _autopilot(spec) if follows_a_plan(spec) else None
        self.overlap = self._autopilot.row.overlap if self._autopilot else spec.algorithm.overlap
        self._throttle = Throttle(TELL_EVERY_S)
        self._reports = 0  # since the last look at a plan
        self._samples_per_s, self._leases = 0.0, 0  # of all workers, and how often that may still be used
        self._described: dict[str, dict[str, Any]] = {}
        self._told: dict[str, dict[str, Any]] = {}

    def joined(self, worker: str) -> None:
        """The worker takes part from now on."""
        if self.sizes:
            self.sizes.joined(worker)

    def left(self, worker: str) -> None:
        """The worker is gone."""
        self._speeds.forget(worker)
        if self.sizes:
            self.sizes.left(worker)

    def stepped(self, worker: str, samples: int, time: TaskTime) -> None:
        """A step of the worker took so long."""
        self._speeds.measured(worker, samples, time.compute_s + time.exchange_s, time.exchange_s)
        if self.sizes:
            self.sizes.stepped(worker, self._speeds)

    def size_of(self, worker: str) -> int:
        """Samples of the worker's next step."""
        return self.sizes.of(worker) if self.sizes else self._spec.fit.batch_size

    @property
    def divides(self) -> bool:
        """Whether the task policy gives each worker its part of an epoch."""
        divided = self._spec.algorithm.tasks in ("static", "proportional")
        return divided and not self._policy.facts.synchronous and self._spec.train.kind == "arrays"

    def shares(self, workers: Sequence[str]) -> dict[str, float] | None:
        """What part of an epoch each worker shall do by the task policy; None: nobody in particular, or not yet."""
        if not self.divides:
            return None
        match self._spec.algorithm.tasks:
            case "static":
                return dict.fromkeys(workers, 1.0)
            case "proportional":
                if any(self._speeds.steps(worker) < SURE_STEPS for worker in workers):
                    return None
                lines = {worker: self._speeds.of(worker) for worker in workers}
                return {w: line.samples_per_s(self.size_of(w)) for w, line in lines.items() if line}
            case _:
                return None

    def lease(self, member: Member, members: Sequence[Member], book: LeaseBook, now: float) -> int:
        """How many tasks the worker shall get now; 0: it waits, because others will be done with the rest sooner."""
        if self._spec.train.kind == "stream" or self._policy.lease_limit is not None:
            size = self._policy.lease_limit or 1
        else:
            step_s = self._speeds.step_s(member.name, self.size_of(member.name))
            size = lease_size(book.remaining, len(members), step_s)
        if self._shares_the_end and self._ends_soon(member.name, size, members, book):
            size = min(size, self._steps_left_for(member, members, book, now))
        return size

    @property
    def _shares_the_end(self) -> bool:
        known = self._spec.train.kind == "arrays" and not self._policy.facts.synchronous
        return known and self._spec.algorithm.tasks == "finish-together"

    def _ends_soon(self, worker: str, size: int, members: Sequence[Member], book: LeaseBook) -> bool:
        """Whether the worker's share of what is left may be under ``size`` steps, so that all have to be looked at.

        The speed of all is added up once for as many leases as there are workers; until then it may double.
        """
        if self._leases <= 0:
            lines = {m.name: line for m in members if (line := self._speeds.now(m.name))}
            self._samples_per_s = sum(line.samples_per_s(self.size_of(name)) for name, line in lines.items())
            self._leases = len(members)
        self._leases -= 1
        step_s = self._speeds.now(worker)
        if step_s is None or not self._samples_per_s:
            return True
        least_s = book.remaining * self._spec.fit.batch_size / (2 * self._samples_per_s)
        return least_s < (size + 1) * step_s.seconds(self.size_of(worker))

    def _steps_left_for(self, member: Member, members: Sequence[Member], book: LeaseBook, now: float) -> int:
        """The worker's steps if what is left of the epoch is shared so that all end together."""
        runners = {m.name: runner for m in members if (runner := self._runner(m, m is member, book, now))}
        if member.name not in runners:
            return 1
        steps = steps_to_share(book.remaining * self._spec.fit.batch_size, list(runners.values()))
        mine = dict(zip(runners, steps, strict=True))[member.name]
        stale_s = STALE_STEPS * runners[member.name].step_s
        return mine or int(
            now - member.leased_at > stale_s
        )  # who never gets anything cannot show that it is quick again

    def _runner(self, member: Member, asks: bool, book: LeaseBook, now: float) -> Runner | None:
        line = self._speeds.now(member.name)
        if line is None:
            return None
        held = book.held(member.name, begun=member.in_flight)
        if held:
            left_s = member.leased_at + sum(line.seconds(task.samples) for task in held) - now
            free_in_s = abs(left_s)  # who is late may be so for as long again
        else:
            free_in_s = 0.0 if asks else max(0.0, now - member.seen_at)  # who is silent may be so for as long again
        size = self.size_of(member.name)
        return Runner(free_in_s, line.seconds(size), size)

    @property
    def described(self) -> dict[str, dict[str, Any]]:
        """What :meth:`describe` said last of each worker, of those that are gone too."""
        return dict(self._described)

    def describe(self, workers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What is known of the speed of each of these workers."""
        for worker in workers:
            size, line = self.size_of(worker), self._speeds.of(worker)
            if line:
                self._described[worker] = {
                    "samples_per_s": round(line.samples_per_s(size), 3),
                    "step_s": round(line.seconds(size), 6),
                    "step_exchange_s": round(self._speeds.exchange_s(worker), 6),
                    "batch_size": size,
                }
        return {worker: self._described[worker] for worker in workers if worker in self._described}

    def may_tell(self, now: float) -> bool:
        """Whether it is time for :meth:`news`; asked once for each time it is."""
        return self._throttle.due(now)

    def news(self, workers: Sequence[str]) -> dict[str, dict[str, Any]] | None:
        """What is worth telling the world about speeds now; None when there is nothing new."""
        described = self.describe(workers)
        if not any(self._is_news(worker, row) for worker, row in described.items()):
            return None
        self._told = described
        return described

    def may_plan(self, workers: int) -> bool:
        """Whether a job that chooses its row looks at its ``workers`` now: once in as many reports; asked at each."""
        if self._autopilot is None:
            return False
        self._reports += 1
        if self._reports < workers:
            return False
        self._reports = 0
        return True

    def plan(self, workers: Sequence[str]) -> dict[str, Any] | None:
        """A new decision of a job that chooses its row while it trains, as the data of an event."""
        if self._autopilot is None or any(self._speeds.steps(worker) < LEAST_STEPS for worker in workers):
            return None
        steps = self._steps(workers)
        choice = self._autopilot.look(steps) if steps else None
        if choice is None:
            return None
        self.overlap = choice.row.overlap
        return told(choice)

    def plan_groups(self, workers: Sequence[str], load: ShardLoad, remaining_s: float) -> Choice | None:
        """Groups that a job that chooses its row shall form now; see :meth:`Autopilot.look_at_groups`."""
        if self._autopilot is None or self._autopilot.choice is None:
            return None
        steps = self._steps(workers)
        return self._autopilot.look_at_groups(steps, load, remaining_s) if len(steps) == len(workers) else None

    def _steps(self, workers: Sequence[str]) -> dict[str, tuple[StepTime, float]]:
        return {w: (line, self._speeds.exchange_s(w)) for w in workers if (line := self._speeds.of(w))}

    def renew(self, spec: JobSpec, sizes: StatedSizes | None) -> None:
        """Between two epochs: the job goes on with other workers, as another row."""
        self._spec, self.sizes, self.overlap = spec, sizes, spec.algorithm.overlap
        self._autopilot = None

    def _is_news(self, worker: str, row: dict[str, Any]) -> bool:
        told = self._told.get(worker)
        if told is None or told["batch_size"] != row["batch_size"]:
            return True
        return bool(abs(row["samples_per_s"] - told["samples_per_s"]) > NEWS * told["samples_per_s"])


def _autopilot(spec: JobSpec) -> Autopilot:
    return Autopilot(spec.fit.batch_size, spec.algorithm.overlap, "dbs" if batch_sizes(spec) else "fixed")
