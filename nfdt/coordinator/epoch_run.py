"""The run of one epoch, from its first task to its event: train, collect, validate, summarise.

A phase says what each worker does next (``instruct``, repeated until the worker has done it), processes its reports
(``absorb``, which returns whether a report advanced the phase) and requeues the work of lost workers (``lost``).
``look`` is called several times a second: a phase goes on without workers that give no sign of life, or are overtaken,
and returns those whose state is missing then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_metrics import EpochMetrics
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.membership import LATE_S, Member, Membership
from nfdt.coordinator.training import TrainingPhase
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.work.instructions import (
    CallbackDecision,
    CollectState,
    EpochState,
    Evaluate,
    FlushShards,
    Instruction,
    Report,
    Summarise,
    Summary,
    Wait,
)
from nfdt.core.work.tasks import Task
from nfdt.model.training.metric_states import merge_metric_states
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


class EpochRun:
    """The phases of one epoch in sequence.

    ::

        train --all tasks done--> collect --states in--> flush the shards --> validate, if due --> summarise
          |  ^                                             |
          v  |                                             '--shards lost before they were flushed--> train
          pause for the client, after collecting all states: a phase that is called train as well

    Args:
        epoch: Number of the epoch.
        training: First phase.
        planner: Makes the rows to evaluate. In a job that only evaluates it joins the workers' answers to the result,
            and the epoch ends with the phase ``validate``.
        members: Workers of the job.
        merger: Untrained state and metrics that all workers share.
        effects: Queue of effects.
        callbacks: State of the callbacks that run on a worker.
        steps: Number of steps; None for a stream of unknown length.

    Attributes:
        current: Current phase; the phases have the same methods.
    """

    def __init__(
        self,
        epoch: int,
        training: TrainingPhase,
        planner: EpochPlanner,
        members: Membership,
        merger: StateMerger,
        effects: EffectQueue,
        callbacks: str,
        steps: int | None,
    ) -> None:
        self.epoch, self.training, self.steps = epoch, training, steps
        self.current: TrainingPhase | Collecting | Validating | Summarising = training
        self._planner, self._members, self._merger, self._effects = planner, members, merger, effects
        self.callbacks = callbacks
        self._flush_requested = False
        self._void_answers = 0  # to flushes that were requested before a loss of the shards
        self._flushed = False
        self._metrics = b""

    def flushed(self) -> bool:
        """Record the answer to a request: the shards have applied every push of the epoch; return whether it counts."""
        if self._void_answers:
            self._void_answers -= 1
            return False
        if self._flush_requested:
            self._flushed = True
            self.training.book.settle()
        return self._flushed

    @property
    def closes(self) -> bool:
        """Whether the shards have the end of the epoch, and its validation or summary is left."""
        return isinstance(self.current, Validating | Summarising)

    def suspend(self) -> None:
        """Record the loss of the shards: a flush that they have not confirmed is void."""
        if self._flush_requested and not self._flushed:
            self._flush_requested = False
            self._void_answers += not self._effects.withdraw(FlushShards(self.epoch))

    def rewind(self) -> int:
        """Train again what the shards lack after their loss; return the number of samples.

        After the confirmed end of the training they lack nothing.
        """
        if self._flushed:
            return 0
        self.current = self.training
        return self.training.rewind()

    def look(self, now: float) -> None:
        """Go on without late workers."""
        if late := self.current.look(now, self._members):
            names = ", ".join(late)
            text = f"Epoch {self.epoch + 1} ends without {names}. Its metrics include what {names} had reported."
            self._effects.emit("log", worker=None, level="warning", text=text)

    def waiting_for(self) -> tuple[str, ...]:
        """Return the causes of the wait: workers by name, or "shards"."""
        if isinstance(self.current, Collecting) and self.current.done:
            return ("shards",)
        return self.current.waiting_for()

    def advance(self) -> bool:
        """Execute every transition that is due; return whether the epoch is over."""
        while True:
            if self.current is self.training and self.training.is_due_to_pause:
                self.current = self._collecting("train")
            if not self.current.done:
                return False
            if isinstance(self.current, Summarising if self._planner.join is None else Validating):
                return True
            if not self._step():
                return False

    def finish(self, seconds: float) -> CallbackDecision | None:
        """Emit the end of the epoch; return the decision of the callbacks, if there are any."""
        join = self._planner.join
        if isinstance(self.current, Validating) and join is not None:
            self._merger.metrics, summary = join(self.current.answers), Summary({})
        else:
            assert isinstance(self.current, Summarising)
            assert self.current.summary is not None
            summary = self.current.summary
        book = self.training.book
        self._effects.emit(
            "epoch_end",
            epoch=self.epoch,
            logs=dict(summary.logs),
            val_logs=dict(summary.val_logs) if summary.val_logs is not None else None,
            seconds=seconds,
            steps=book.steps_finished,
            samples=book.samples_finished,
        )
        for text in summary.decision.messages if summary.decision is not None else ():
            self._effects.emit("log", worker=None, level="info", text=text)
        return summary.decision

    def _step(self) -> bool:
        phase = self.current
        if isinstance(phase, TrainingPhase):
            self._collect(phase)
        elif isinstance(phase, Collecting):
            if phase.name == "train":
                self._pause(phase)
            elif self._flushed:
                self._validate()
            else:
                self._flush(phase)
                return False
        elif isinstance(phase, Validating):
            self._summarise(merge_metric_states(phase.answers))
        return True

    def _pause(self, collected: Collecting) -> None:
        """Publish the current state; emit that the job waits for the client and whether a step follows."""
        training = self.training
        self._merger.show(collected.untrained(training.counts), collected.metrics())
        training.gate.pause(training.book.steps_finished)
        self.current = training
        self._effects.progress(self.epoch, training, pause=not training.book.done)

    def _collect(self, training: TrainingPhase) -> None:
        self._effects.progress(self.epoch, training)
        self.current = self._collecting("collect")

    def _flush(self, collected: Collecting) -> None:
        """Publish the state of the epoch's end, and let the shards store it with theirs."""
        if not self._flush_requested:
            self._metrics = collected.metrics()
            self._merger.show(collected.untrained(self.training.counts), self._metrics)
            self._flush_requested = True
            self._effects.add(FlushShards(self.epoch))

    def _collecting(self, name: str) -> Collecting:
        workers = {m.name: m.index for m in self._members.in_epoch(self.epoch)}
        last = self.epoch + 1 >= self._planner.spec.fit.epochs
        return Collecting(self.epoch, workers, name, self.training.metrics, last=last)

    def _validate(self) -> None:
        self._merger.settle()
        book = self._planner.validation(self.epoch)
        if book is None:
            self._summarise(b"")
        else:
            self.current = Validating(self.epoch, book, self._merger.encoded, lambda: len(self._members.ready()))

    def _summarise(self, validation_metrics: bytes) -> None:
        logs = self.training.logs.mean()
        self._merger.metrics = validation_metrics or self._metrics
        steps = self.training.book.steps_finished
        self.current = Summarising(
            Summarise(self.epoch, self._metrics, validation_metrics, logs, steps, self.callbacks)
        )
