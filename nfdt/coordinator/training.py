"""The phase in which tasks are leased, and the gate that lets it begin and go on, as the client permits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from nfdt.coordinator.decisions import Decisions, lease_s
from nfdt.coordinator.epoch_metrics import EpochMetrics
from nfdt.coordinator.membership import LATE_S, Member, Membership
from nfdt.coordinator.progress import RunningLogs
from nfdt.core.work.instructions import BeginEpoch, Instruction, Report, TaskTime, Wait, Work
from nfdt.core.work.tasks import Task
from nfdt.schedulers.leases import LeaseBook

BUDGET = 1.25  # of a lease, in times of its target


class Gate:
    """Gate through which the client and the server let epochs begin, and the client lets steps run up to a number.

    The epoch pauses there until the client permits more steps.

    Args:
        permitted: Last epoch that may begin.
        held: Whether every epoch also waits for :meth:`release`, which the server calls between two epochs.

    Attributes:
        standing: Whether the epoch is paused: the client has been notified and has not answered.
        paused_at: Number of finished steps of the epoch at its last pause; 0 before the first one.
    """

    def __init__(self, permitted: int, *, held: bool = False) -> None:
        self.standing = False
        self._permitted = permitted
        self._held, self._released = held, not held
        self._until: int | None = None  # steps of the epoch that are permitted; None: all
        self._next_until: int | None = None  # the same for the epoch that begins next
        self.paused_at = 0

    # ---- epochs

    def is_permitted(self, epoch: int) -> bool:
        """Whether the client permits this epoch to begin."""
        return self._permitted >= epoch

    def may_begin(self, epoch: int) -> bool:
        """Whether the client and the server permit this epoch to begin."""
        return self._released and self.is_permitted(epoch)

    def permit(self, epoch: int, until: int | None) -> None:
        """Permit this epoch and those before it to begin; the one that begins next pauses after ``until`` steps."""
        self._permitted = max(self._permitted, epoch)
        self._next_until = until

    def release(self) -> None:
        """Let the next epoch begin as soon as it is permitted."""
        self._released = True

    def begin_epoch(self) -> None:
        """Begin an epoch that has not paused yet."""
        self.standing, self._until, self.paused_at = False, self._next_until, 0
        self._released = not self._held

    # ---- steps

    @property
    def open(self) -> bool:
        """Whether the epoch never pauses."""
        return self._until is None

    def left(self, finished: int) -> int:
        """Return the number of steps that may still be finished; only for a gate that is not open."""
        assert self._until is not None
        return 0 if self.standing else max(0, self._until - finished)

    def is_due(self, finished: int, ended: bool) -> bool:
        """Whether the epoch must pause after ``finished`` steps; ``ended``: it has no more steps."""
        if self._until is None or self.standing:
            return False
        return finished > self.paused_at and (finished >= self._until or ended)

    def pause(self, finished: int) -> None:
        """Pause after ``finished`` steps, unless the gate was opened meanwhile."""
        self.standing, self.paused_at = not self.open, finished

    def resume(self, until: int | None) -> None:
        """Permit more steps; a number that is not greater than before has no effect."""
        if until is None or until > self.paused_at:
            self.standing, self._until = False, until


class TrainingPhase:
    """Phase in which tasks are leased under the consistency policy and the task policy.

    Args:
        begin: First instruction of every worker.
        book: Tasks of the epoch.
        decisions: Policies that decide which workers may proceed, and the size of their leases.
        members: Workers of the job.
        ranks: Preferred part of a round for each worker; may change from round to round.
        gate: Gate at which the epoch pauses for the client.

    Attributes:
        trained: Number of samples of the tasks that each worker has finished, each task counted for one worker.
    """

    name = "train"

    def __init__(
        self,
        begin: BeginEpoch,
        book: LeaseBook,
        decisions: Decisions,
        members: Membership,
        ranks: Mapping[str, int],
        gate: Gate,
    ) -> None:
        self.book = book
        self.logs, self.metrics, self.trained = RunningLogs(), EpochMetrics(), Counter[str]()
        self.gate = gate
        self._begin = begin
        self._policy = decisions.policy
        self._decisions = decisions
        self._members = members
        self._ranks = ranks
        self._untrained = b""  # state that replaces the workers' own
        self._given = set[str]()  # the workers that have it
        self._late_from, self._missing = -math.inf, -1  # nobody is late before, while so many are lost or suspected
        self._backed_up: dict[str, frozenset[int]] = {}  # tasks of late workers that a worker holds
        self._divided = not gate.open  # a reserved share could keep all other workers from a permitted step
        self._divide()

    def instruct(self, member: Member, now: float) -> Instruction:
        """Return BeginEpoch once, then the work that the lease book and the policy allow."""
        worker, epoch = member.name, self._begin.epoch
        if member.epoch != epoch:
            member.epoch = epoch
            self.book.join(worker)
            return self._begin
        held = self.book.held(worker, begun=member.in_flight)
        if held:
            return self._work(member, held)
        if self.book.exhausted(worker) and (tasks := self._back_up(member, now)):
            return self._work(member, tasks)
        if self.book.exhausted(worker) or not self._let_through(member):
            if not member.in_flight:  # otherwise it reports first
                self._policy.idle(worker)
            return Wait()
        if not self.book.available(worker) or not self._policy.may_start(worker, len(member.in_flight)):
            return Wait()
        size = self._lease(member, now)
        if not size:
            self._policy.idle(worker)
            return Wait()
        self._decisions.speeds.look(now)
        if not (tasks := self.book.issue(worker, size, self._ranks.get(worker))):
            self._policy.idle(worker)
            return Wait()
        pull = self._policy.must_pull(worker, len(member.in_flight))
        self._policy.started(worker, len(tasks))
        member.pulls = pull, self._policy.will_pull(worker, len(member.in_flight))
        member.leased_at = max(now, member.free_at)
        self._decisions.speeds.leased(worker, tasks, member.leased_at)
        return self._work(member, tasks)

    def _back_up(self, member: Member, now: float) -> tuple[Task, ...]:
        """Lease the tasks of late workers to one that has nothing left."""
        leases, worker = self._decisions.leases, member.name
        if not (leases.backs_up and self.gate.open) or member.in_flight:
            return ()
        late = self._late(now)
        for name in late:
            self.book.free_share(name)
        if not late or not self.book.exhausted(worker):
            return ()
        tasks = self.book.back_up(worker, late, leases.size_of_rest(member, self._members.ready(), self.book.leased))
        if tasks:
            self._backed_up[worker] = frozenset(task.task for task in tasks)
            self._policy.started(worker, len(tasks))
            member.pulls, member.leased_at = (False, False), max(now, member.free_at)
        return tasks

    def _late(self, now: float) -> frozenset[str]:
        """Return the workers whose tasks others may take: those that are overdue, or give no sign of life.

        All holders are looked at only if one of them may be late by now: each worker without tasks asks for it.
        """
        if now < self._late_from and self._missing == self._members.missing:
            return frozenset()
        late, soonest = set(), now + LATE_S  # a lease that is granted later is late no sooner
        for name in self.book.holders():
            member = self._members.get(name)
            if member is None or member.is_late(self._expected_s(name), now):
                late.add(name)
            else:
                soonest = min(soonest, member.late_at(self._expected_s(name)))
        self._late_from, self._missing = now if late else soonest, self._members.missing
        return frozenset(late)

    def _expected_s(self, worker: str) -> float | None:
        """Return the expected seconds of the tasks that a worker holds; None: unknown."""
        step_s = self._decisions.speeds.step_s(worker)
        return None if step_s is None else step_s * len(self.book.held(worker))

    def look(self, now: float, members: Membership) -> Sequence[str]:
        """Return no worker: one that has nothing left asks for the tasks of late ones."""
        return ()

    def _let_through(self, member: Member) -> bool:
        """Whether the gate permits a step of the worker.

        If fewer asynchronous steps than workers are permitted, the first workers get them. A single step at a time goes
        to one worker as long as it lives, so that its state (seeds, statistics) continues as in one process.
        """
        if self.gate.open:
            return True
        left = self.gate.left(self.book.steps_finished)
        if self._policy.facts.synchronous:
            return left > 0
        able = [other for other in self._members.ready() if not self.book.exhausted(other.name)]
        return left > self.book.leased and member in able[:left]

    def _lease(self, member: Member, now: float) -> int:
        size = self._decisions.leases.size(member, self._members.ready(), self.book, now)
        if self.gate.open or self._policy.facts.synchronous:
            return size
        return min(max(1, size), self.gate.left(self.book.steps_finished) - self.book.leased)

    def _work(self, member: Member, tasks: tuple[Task, ...]) -> Work:
        untrained = b"" if member.name in self._given else self._untrained
        # A request ahead commits to a step that the client may not have permitted yet.
        ahead = self.gate.open and self._decisions.leases.looks_ahead(member, len(tasks), self.book)
        member.ahead = tasks[-1].task if ahead else None
        overlap, apart = self._decisions.plan.overlap, tasks[0].task in self._backed_up.get(member.name, ())
        budget_s, options = BUDGET * lease_s(len(self._members.ready())), {"look_ahead": ahead, "apart": apart}
        return Work(self._begin.epoch, tasks, budget_s, overlap, untrained, *member.pulls, **options)

    def replaced(self, untrained: bytes) -> None:
        """Replace the state of every worker while the epoch is paused."""
        self._untrained, self._given = untrained, set()

    def counts(self, worker: str) -> bool:
        """Whether the worker's own state is merged into the shared state."""
        return not self._untrained or worker in self._given

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Mark tasks as finished, requeue those that the worker has not begun, record its speed and running logs."""
        name, samples = member.name, report.samples
        begun = self.book.held(name) if member.ahead in report.in_flight else ()  # it has just begun the last of them
        computing_s = self._decisions.speeds.step_s(name, begun[-1].samples) if begun else None
        member.free_at, member.ahead = now + (computing_s or 0.0), None
        shared = [n for n in report.finished if self.book.is_shared(name, n)]
        if report.epoch == self._begin.epoch:
            self.metrics.reported(member, report, shared)
        tasks = [task for n in report.finished if (task := self._finish(name, n, samples.get(n)))]
        if report.finished or report.in_flight:
            self._given.add(member.name)
        if tasks or report.in_flight:
            self.book.give_back(member.name, begun=report.in_flight)
            self._late_from = min(self._late_from, member.late_at(self._expected_s(name)))  # it holds fewer tasks
        if not tasks:
            return False
        self._policy.finished(member.name, len(tasks))
        unmeasured = TaskTime((now - member.leased_at) / len(tasks))
        for task in tasks:
            self._decisions.speeds.stepped(member.name, task.samples, report.times.get(task.task, unmeasured))
        self._divide()
        logs = report.logs if report.epoch == self._begin.epoch else {}
        trained = sum(t.samples for t in tasks)
        self.trained[name] += trained
        self.logs.add(name, trained, logs)
        return True

    def _finish(self, worker: str, task: int, samples: int | None) -> Task | None:
        others = self.book.also_held_by(worker, task)
        done = self.book.finish(worker, task, samples)
        for name in others if done else ():
            if (other := self._members.get(name)) is not None:
                other.overtaken = True
        return done

    def lost(self, worker: str) -> int:
        """Take back the tasks of a lost worker; see :meth:`LeaseBook.lose`."""
        return self.book.lose(worker)

    def resolve(self, worker: str, applied: Sequence[Collection[int]]) -> int:
        """Finish those tasks of a lost worker that all shards have applied; see :meth:`LeaseBook.resolve`."""
        doubtful = self.book.doubtful(worker)
        lacking = [task for task in doubtful if not (applied and all(task in shard for shard in applied))]
        self.metrics.repeated(worker, lacking)
        before = self.book.samples_finished
        finished = self.book.resolve(worker, applied)
        self.trained[worker] += self.book.samples_finished - before
        return finished

    def rewind(self) -> int:
        """Requeue what the shards have lost; return its samples."""
        self._policy.rewound()
        return self.book.rewind()

    def _divide(self) -> None:
        """Divide the epoch among the workers once, as soon as the task policy can."""
        if self._divided or not self._decisions.leases.divides:
            return
        if shares := self._decisions.leases.shares([m.name for m in self._members.ready()]):
            self.book.divide(shares)
            self._divided = True

    @property
    def is_due_to_pause(self) -> bool:
        """Whether the epoch must pause for the client, and it is known whether a step will follow."""
        if self.gate.open or self.book.leased:
            return False
        return self.gate.is_due(self.book.steps_finished, self.book.done) and self.book.decided

    @property
    def done(self) -> bool:
        """Whether every task is finished, and the client has confirmed any pause."""
        return self.book.done and not self.gate.standing and not self.is_due_to_pause

    def waiting_for(self) -> tuple[str, ...]:
        """Return the workers that hold tasks, or "client" during a pause."""
        return ("client",) if self.gate.standing else self.book.holders()
