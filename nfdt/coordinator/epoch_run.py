"""The run of one epoch, from its first task to its event: train, collect, validate, summarise."""

from __future__ import annotations

from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_phases import Collecting, Summarising, Validating
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.training import TrainingPhase
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.work.instructions import (
    CallbackDecision,
    FlushShards,
    Summarise,
    Summary,
)
from nfdt.model.training.metric_states import merge_metric_states


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
