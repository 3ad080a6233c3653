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
        """Return the instruction of this worker; the same again until it is carried out."""
        ...

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Take a worker's report; return whether it brought the phase forward."""
        ...

    def lost(self, worker: str) -> int:
        """Give the work of a lost worker to others; return the number of tasks that go back."""
        ...

    @property
    def done(self) -> bool:
        """Whether the phase is over."""
        ...

    def waiting_for(self) -> tuple[str, ...]:
        """Return the workers whose work is outstanding."""
        ...


class Collecting:
    """Every worker that took part sends its untrained state and its metrics.

    ``name``: ``train`` where the epoch only stands still.
    """

    def __init__(self, epoch: int, workers: Mapping[str, int], name: str = "collect") -> None:
        self.name = name
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
        """Go on without the state of a lost worker."""
        self._expected.discard(worker)
        return 0

    @property
    def done(self) -> bool:
        """Whether all living workers have answered."""
        return not self._expected

    def waiting_for(self) -> tuple[str, ...]:
        """Return the workers that have not answered."""
        return tuple(sorted(self._expected))

    def untrained(self, counts: Callable[[str], bool]) -> list[tuple[int, int, bytes]]:
        """(worker index, steps, safetensors) of each state that counts."""
        return [(self._indices[w], s.steps, s.untrained) for w, s in self.states.items() if counts(w)]

    def metrics(self) -> list[bytes]:
        """Metric variables of each state, by worker index."""
        return [self.states[w].metrics for w in sorted(self.states, key=self._indices.__getitem__)]


class Validating:
    """The validation data are shared out in guided pieces of at most about a second."""

    name = "validate"

    def __init__(self, epoch: int, book: LeaseBook, untrained: bytes, workers: Callable[[], int]) -> None:
        self.metrics: list[bytes] = []
        self._epoch = epoch
        self._book = book
        self._untrained = untrained
        self._workers = workers
        self._task_s: dict[str, float] = {}  # seconds of each worker's last task

    def instruct(self, member: Member, now: float) -> Instruction:
        """Evaluate what the worker holds, or a new piece."""
        tasks = self._book.held(member.name)
        if not tasks:
            left, task_s = self._book.remaining, self._task_s.get(member.name)
            size = lease_size(left, self._workers(), task_s, target_s=VALIDATION_LEASE_S, most=max(1, left))
            tasks = self._book.issue(member.name, size)
            member.leased_at = now
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
        self._task_s[member.name] = max(now - member.leased_at, LEAST_S) / len(answer.tasks)
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
        """Let another worker do it."""
        if self._worker == worker:
            self._worker = None
        return 0

    @property
    def done(self) -> bool:
        """Whether there is a summary."""
        return self.summary is not None

    def waiting_for(self) -> tuple[str, ...]:
        """Return the worker that summarises, if there is one."""
        return (self._worker,) if self._worker else ()
