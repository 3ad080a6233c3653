"""The interface of a phase of an epoch, and the phases after training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from nfdt.coordinator.membership import Member
from nfdt.core.work.instructions import (
    CollectState,
    EpochState,
    Evaluate,
    Instruction,
    Report,
    Summarise,
    Summary,
    Wait,
)
from nfdt.schedulers import LeaseBook, lease_size

VALIDATION_LEASE_S = 1.0  # seconds per lease: workers report often, and a lost one holds few rows
LEAST_S = 1e-6


class Phase(Protocol):
    """One phase of one epoch."""

    name: str

    def instruct(self, member: Member, now: float) -> Instruction:
        """Return the instruction of this worker; repeat it until it is executed."""
        ...

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Process a worker's report; return whether it advanced the phase."""
        ...

    def lost(self, worker: str) -> int:
        """Requeue the work of a lost worker; return the number of requeued tasks."""
        ...

    @property
    def done(self) -> bool:
        """Whether the phase is over."""
        ...

    def waiting_for(self) -> tuple[str, ...]:
        """Return the workers whose work is outstanding."""
        ...


class Collecting:
    """Phase in which every worker of the epoch sends its untrained state and its metrics.

    ``name`` is ``train`` for an epoch that only pauses.
    """

    def __init__(self, epoch: int, workers: Mapping[str, int], name: str = "collect") -> None:
        self.name = name
        self.states: dict[str, EpochState] = {}
        self._epoch = epoch
        self._indices = dict(workers)
        self._expected = set(workers)

    def instruct(self, member: Member, now: float) -> Instruction:
        """Return CollectState until the worker has answered."""
        if member.name not in self._expected:
            return Wait()
        return CollectState(self._epoch, over=self.name != "train")

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Store the state."""
        state = report.epoch_state
        if state is None or state.epoch != self._epoch or member.name not in self._expected:
            return False
        self.states[member.name] = state
        self._expected.discard(member.name)
        return True

    def lost(self, worker: str) -> int:
        """Continue without the state of a lost worker."""
        self._expected.discard(worker)
        return 0

    @property
    def done(self) -> bool:
        """Whether all live workers have answered."""
        return not self._expected

    def waiting_for(self) -> tuple[str, ...]:
        """Return the workers that have not answered."""
        return tuple(sorted(self._expected))

    def untrained(self, counts: Callable[[str], bool]) -> list[tuple[int, int, bytes]]:
        """Return (worker index, steps, safetensors) of each state that counts."""
        return [(self._indices[w], s.steps, s.untrained) for w, s in self.states.items() if counts(w)]

    def metrics(self) -> list[bytes]:
        """Return the metric variables of each state, by worker index."""
        return [self.states[w].metrics for w in sorted(self.states, key=self._indices.__getitem__)]


class Validating:
    """Phase in which the validation data are leased by guided self-scheduling, about one second at most per lease.

    Attributes:
        answers: Metric states, or names of outputs in a job that predicts; each covers other tasks.
    """

    name = "validate"

    def __init__(self, epoch: int, book: LeaseBook, untrained: bytes, workers: Callable[[], int]) -> None:
        self.answers: list[bytes] = []
        self._epoch = epoch
        self._book = book
        self._untrained = untrained
        self._workers = workers
        self._task_s: dict[str, float] = {}  # seconds of each worker's last task

    def instruct(self, member: Member, now: float) -> Instruction:
        """Return Evaluate for the held tasks, or for a new lease."""
        tasks = self._book.held(member.name)
        if not tasks:
            left, task_s = self._book.remaining, self._task_s.get(member.name)
            size = lease_size(left, self._workers(), task_s, target_s=VALIDATION_LEASE_S, most=max(1, left))
            tasks = self._book.issue(member.name, size)
            member.leased_at = now
        return Evaluate(self._epoch, tasks, self._untrained) if tasks else Wait()

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Store the answer if it covers held tasks only; held tasks that it does not cover are evaluated again."""
        answer = report.evaluated
        if answer is None or answer.epoch != self._epoch or not answer.tasks:
            return False
        if not set(answer.tasks) <= {t.task for t in self._book.held(member.name)}:
            return False
        for task in answer.tasks:
            self._book.finish(member.name, task)
        self._task_s[member.name] = max(now - member.leased_at, LEAST_S) / len(answer.tasks)
        member.leased_at = now
        self.answers.append(answer.metrics)
        return True

    def lost(self, worker: str) -> int:
        """Requeue the rows of a lost worker."""
        return self._book.give_back(worker)

    @property
    def done(self) -> bool:
        """Whether every row is evaluated."""
        return self._book.done

    def waiting_for(self) -> tuple[str, ...]:
        """Return the workers that hold rows."""
        return self._book.holders()


class Summarising:
    """Phase in which one worker converts merged metrics into logs."""

    name = "summarise"

    def __init__(self, order: Summarise) -> None:
        self.summary: Summary | None = None
        self._order = order
        self._worker: str | None = None

    def instruct(self, member: Member, now: float) -> Instruction:
        """Return Summarise to the first worker that requests work."""
        if self._worker is None and self.summary is None:
            self._worker = member.name
        return self._order if self._worker == member.name else Wait()

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Store the summary."""
        if report.summary is None or self._worker != member.name:
            return False
        self.summary = report.summary
        return True

    def lost(self, worker: str) -> int:
        """Assign the summary to another worker."""
        if self._worker == worker:
            self._worker = None
        return 0

    @property
    def done(self) -> bool:
        """Whether the summary has arrived."""
        return self.summary is not None

    def waiting_for(self) -> tuple[str, ...]:
        """Return the worker that summarises, if there is one."""
        return (self._worker,) if self._worker else ()
