"""The phases of an epoch in which workers do something: each instructs, absorbs reports, survives losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.instructions import (
    BeginEpoch,
    CollectState,
    EpochState,
    Evaluate,
    Instruction,
    Report,
    Summarise,
    Summary,
    TaskTime,
    Wait,
    Work,
)
from nfdt.coordinator.membership import Member, Membership
from nfdt.coordinator.pace import Pace
from nfdt.coordinator.progress import RunningLogs
from nfdt.schedulers import LeaseBook

LEASE_BUDGET_S = 0.25  # a little more than a lease shall last


class Phase(Protocol):
    """One phase of one epoch."""

    name: str

    def instruct(self, member: Member, now: float) -> Instruction:
        """What this worker shall do; the same again if it has not done it."""
        ...

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Take what the worker reports; whether it brought the phase forward."""
        ...

    def lost(self, worker: str) -> int:
        """The worker is gone: somebody else shall do its work. Returns the tasks that go back."""
        ...

    @property
    def done(self) -> bool:
        """Whether the phase is over."""
        ...

    def waiting_for(self) -> tuple[str, ...]:
        """Whose work is outstanding."""
        ...


class Training:
    """Tasks are leased as the consistency policy allows and the task policy decides.

    Args:
        begin: What every worker is told first.
        book: The epoch's tasks.
        policy: Who may proceed.
        pace: How fast everybody is, and how much it shall get.
        members: Who takes part.
        ranks: Which part of a round is meant for whom; may change from round to round.
    """

    name = "train"

    def __init__(
        self,
        begin: BeginEpoch,
        book: LeaseBook,
        policy: ConsistencyPolicy,
        pace: Pace,
        members: Membership,
        ranks: Mapping[str, int],
    ) -> None:
        self.book = book
        self.logs = RunningLogs()
        self._begin = begin
        self._policy = policy
        self._pace = pace
        self._members = members
        self._ranks = ranks
        self._divided = False
        self._divide()

    def instruct(self, member: Member, now: float) -> Instruction:
        """BeginEpoch once, then work as the lease book and the policy allow."""
        worker, epoch = member.name, self._begin.epoch
        if member.epoch != epoch:
            member.epoch = epoch
            return self._begin
        held = self.book.held(worker, begun=member.in_flight)
        if held:
            return Work(epoch, held, LEASE_BUDGET_S, self._pace.overlap)
        if self.book.exhausted(worker):
            self._policy.idle(worker)
            return Wait()
        if not self.book.available(worker) or not self._policy.may_start(worker, len(member.in_flight)):
            return Wait()
        size = self._pace.lease(member, self._members.ready(), self.book, now)
        if not size:
            self._policy.idle(worker)
            return Wait()
        tasks = self.book.issue(worker, size, self._ranks.get(worker))
        self._policy.started(worker, len(tasks))
        member.leased_at = now
        return Work(epoch, tasks, LEASE_BUDGET_S, self._pace.overlap)

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Tick tasks off, take back what the worker has not begun, note its speed and its running logs."""
        tasks = [t for t in (self.book.finish(member.name, number) for number in report.finished) if t]
        if tasks or report.in_flight:
            self.book.give_back(member.name, begun=report.in_flight)
        if not tasks:
            return False
        self._policy.finished(member.name, len(tasks))
        unmeasured = TaskTime((now - member.leased_at) / len(tasks))
        for task in tasks:
            self._pace.stepped(member.name, task.samples, report.times.get(task.task, unmeasured))
        self._divide()
        logs = report.logs if report.epoch == self._begin.epoch else {}
        self.logs.add(member.name, sum(t.samples for t in tasks), logs)
        return True

    def lost(self, worker: str) -> int:
        """Its tasks go to the others."""
        return self.book.lose(worker)

    def _divide(self) -> None:
        """Share the epoch out among the workers, once, as soon as the task policy can."""
        if self._divided or not self._pace.divides:
            return
        if shares := self._pace.shares([m.name for m in self._members.ready()]):
            self.book.divide(shares)
            self._divided = True

    @property
    def done(self) -> bool:
        """Whether every task is finished."""
        return self.book.done

    def waiting_for(self) -> tuple[str, ...]:
        """The workers that hold tasks."""
        return self.book.holders()


class Collecting:
    """Every worker that took part sends its untrained state and its metrics."""

    name = "collect"

    def __init__(self, epoch: int, workers: Mapping[str, int]) -> None:
        self.states: dict[str, EpochState] = {}
        self._epoch = epoch
        self._indices = dict(workers)
        self._expected = set(workers)

    def instruct(self, member: Member, now: float) -> Instruction:
        """CollectState until it is answered."""
        return CollectState(self._epoch) if member.name in self._expected else Wait()

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Keep the state."""
        state = report.epoch_state
        if state is None or state.epoch != self._epoch or member.name not in self._expected:
            return False
        self.states[member.name] = state
        self._expected.discard(member.name)
        return True

    def lost(self, worker: str) -> int:
        """Nobody else has its state: go on without it."""
        self._expected.discard(worker)
        return 0

    @property
    def done(self) -> bool:
        """Whether everybody who lives has answered."""
        return not self._expected

    def waiting_for(self) -> tuple[str, ...]:
        """Who has not answered."""
        return tuple(sorted(self._expected))

    def untrained(self) -> list[tuple[int, int, bytes]]:
        """(worker index, steps, safetensors) of each state."""
        return [(self._indices[w], s.steps, s.untrained) for w, s in self.states.items()]

    def metrics(self) -> list[bytes]:
        """Metric variables of each state, by worker index."""
        return [self.states[w].metrics for w in sorted(self.states, key=self._indices.__getitem__)]


class Validating:
    """The validation data are shared out in guided pieces."""

    name = "validate"

    def __init__(self, epoch: int, book: LeaseBook, untrained: bytes, workers: Callable[[], int]) -> None:
        self.metrics: list[bytes] = []
        self._epoch = epoch
        self._book = book
        self._untrained = untrained
        self._workers = workers

    def instruct(self, member: Member, now: float) -> Instruction:
        """Evaluate what the worker holds, or a new piece."""
        tasks = self._book.held(member.name)
        if not tasks:
            size = -(-self._book.remaining // (2 * max(1, self._workers())))
            tasks = self._book.issue(member.name, max(1, size))
        return Evaluate(self._epoch, tasks, self._untrained) if tasks else Wait()

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Keep the metrics of exactly the tasks the worker holds; anything else is done again."""
        answer = report.evaluated
        if answer is None or answer.epoch != self._epoch or not answer.tasks:
            return False
        if set(answer.tasks) != {t.task for t in self._book.held(member.name)}:
            return False
        for task in answer.tasks:
            self._book.finish(member.name, task)
        self.metrics.append(answer.metrics)
        return True

    def lost(self, worker: str) -> int:
        """Its rows go to the others."""
        return self._book.lose(worker)

    @property
    def done(self) -> bool:
        """Whether every row is evaluated."""
        return self._book.done

    def waiting_for(self) -> tuple[str, ...]:
        """The workers that hold rows."""
        return self._book.holders()


class Summarising:
    """One worker turns merged metrics into logs."""

    name = "summarise"

    def __init__(self, order: Summarise) -> None:
        self.summary: Summary | None = None
        self._order = order
        self._worker: str | None = None

    def instruct(self, member: Member, now: float) -> Instruction:
        """Summarise, to the first that asks."""
        if self._worker is None and self.summary is None:
            self._worker = member.name
        return self._order if self._worker == member.name else Wait()

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Keep the summary."""
        if report.summary is None or self._worker != member.name:
            return False
        self.summary = report.summary
        return True

    def lost(self, worker: str) -> int:
        """Somebody else does it."""
        if self._worker == worker:
            self._worker = None
        return 0

    @property
    def done(self) -> bool:
        """Whether there is a summary."""
        return self.summary is not None

    def waiting_for(self) -> tuple[str, ...]:
        """Who summarises."""
        return (self._worker,) if self._worker else ()
