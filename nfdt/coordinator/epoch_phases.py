"""Phases of an epoch after its training: collect, validate, summarise.

A phase says what each worker does next (``instruct``, repeated until the worker has done it), processes its reports
(``absorb``, which returns whether a report advanced the phase) and requeues the work of lost workers (``lost``).
``look`` is called several times a second: a phase goes on without workers that give no sign of life, or are overtaken,
and returns those whose state is missing then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nfdt.coordinator.epoch_metrics import EpochMetrics
from nfdt.coordinator.membership import LATE_S, Member, Membership
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
from nfdt.core.work.tasks import Task
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.throughput import lease_size

VALIDATION_LEASE_S = 1.0  # seconds per lease: workers report often, and a lost one holds few rows
LEAST_S = 1e-6


class Collecting:
    """Phase in which every worker of the epoch sends its untrained state and its metrics.

    ``name`` is ``train`` for an epoch that only pauses. ``metrics`` has what the workers have reported before.
    ``last``: no epoch follows as planned.
    """

    def __init__(
        self,
        epoch: int,
        workers: Mapping[str, int],
        name: str = "collect",
        metrics: EpochMetrics | None = None,
        *,
        last: bool = False,
    ) -> None:
        self.name, self._last = name, last
        self._metrics = metrics or EpochMetrics()
        self.states: dict[str, EpochState] = {}
        self._epoch = epoch
        self._indices = dict(workers)
        self._expected = set(workers)
        self._looked_at: float | None = None  # for the first time

    def instruct(self, member: Member, now: float) -> Instruction:
        """Return CollectState until the worker has answered."""
        if member.name not in self._expected:
            return Wait()
        over = self.name != "train"
        return CollectState(self._epoch, over=over, last=over and self._last)

    def absorb(self, member: Member, report: Report, now: float) -> bool:
        """Store the state."""
        state = report.epoch_state
        if state is None and report.epoch == self._epoch and member.name in self._indices:
            self._metrics.reported(member, report, report.finished)
        if state is None or state.epoch != self._epoch or member.name not in self._expected:
            return False
        self._metrics.reported(member, report, report.finished)
        self.states[member.name] = state
        self._expected.discard(member.name)
        return True

    def look(self, now: float, members: Membership) -> Sequence[str]:
        """Continue without suspected workers, and after a while without overtaken ones, once there is any state."""
        if self._looked_at is None:
            self._looked_at = now
        waited = now - self._looked_at >= LATE_S
        missing = [member for name in sorted(self._expected) if (member := members.get(name)) is not None]
        late = [member.name for member in missing if member.suspected or (member.overtaken and waited)]
        late = late if self.states else []
        self._expected.difference_update(late)
        return late

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

    def metrics(self) -> bytes:
        """Return the merged metric variables of all states, and of those that workers have reported before."""
        return self._metrics.merged()


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
        self._late: frozenset[str] = frozenset()  # workers whose tasks others may evaluate, too

    def instruct(self, member: Member, now: float) -> Instruction:
        """Return Evaluate for the held tasks, or for a new lease."""
        tasks = self._book.held(member.name)
        if not tasks:
            left, task_s = self._book.remaining, self._task_s.get(member.name)
            size = lease_size(left, self._workers(), task_s, target_s=VALIDATION_LEASE_S, most=max(1, left))
            tasks = self._book.issue(member.name, size) or self._back_up(member.name)
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

    def _back_up(self, worker: str) -> tuple[Task, ...]:
        """Lease all tasks of a late worker to another one: the first answer counts, and the other is dropped."""
        for late in self._late:
            if tasks := self._book.back_up(worker, {late}, len(self._book.held(late))):
                return tasks
        return ()

    def look(self, now: float, members: Membership) -> Sequence[str]:
        """Note which workers are late; return none."""
        holding = [member for name in self._book.holders() if (member := members.get(name)) is not None]
        self._late = frozenset(member.name for member in holding if member.is_late(self._expected_s(member.name), now))
        return ()

    def _expected_s(self, worker: str) -> float | None:
        task_s = self._task_s.get(worker)
        return None if task_s is None else task_s * len(self._book.held(worker))

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

    def look(self, now: float, members: Membership) -> Sequence[str]:
        """Assign the summary to another worker, if its worker is suspected; return none."""
        member = members.get(self._worker or "")
        if member is not None and member.suspected:
            self._worker = None
        return ()

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
