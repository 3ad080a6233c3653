"""The run of one epoch, from its first task to its event: train, collect, validate, summarise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.phases import Collecting, Phase, Summarising, Validating
from nfdt.coordinator.training import TrainingPhase
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.work.instructions import CallbackDecision, FlushShards, Summarise, Summary
from nfdt.model.training.metric_states import merge_metric_states
from nfdt.schedulers import LeaseBook


class EpochRun:
    """The phases of one epoch in sequence.

    ::

        train --all tasks done--> collect --states in, shards flushed--> validate, if due --> summarise
          |  ^                      |
          v  |                      '--shards lost before they were flushed--> train
          pause for the client, after collecting all states: a phase that is called train as well

    Args:
        epoch: Number of the epoch.
        training: First phase.
        members: Workers of the job.
        merger: Untrained state and metrics that all workers share.
        effects: Queue of effects.
        validation: Makes the rows to evaluate; None: there are none.
        join: Joins the workers' answers to the result of a job that only evaluates, whose epoch ends with the phase
            ``validate``; None: the job trains.

    Attributes:
        current: Current phase.
    """

    def __init__(
        self,
        epoch: int,
        training: TrainingPhase,
        members: Membership,
        merger: StateMerger,
        effects: EffectQueue,
        validation: Callable[[], LeaseBook | None],
        callbacks: str = "",
        join: Callable[[Sequence[bytes]], bytes] | None = None,
    ) -> None:
        self.epoch = epoch
        self.current: Phase = training
        self.training = training
        self._members = members
        self._merger = merger
        self._effects = effects
        self._validation, self._join = validation, join
        self._callbacks = callbacks
        self._flush_requested = False
        self._void_answers = 0  # to flushes that were requested before a loss of the shards
        self._flushed = False
        self._metrics = b""

    def flushed(self) -> None:
        """Record the answer to a request: the shards have applied every push of this epoch."""
        if self._void_answers:
            self._void_answers -= 1
        elif self._flush_requested:
            self._flushed = True
            self.training.book.settle()

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

    @property
    def handed_out(self) -> bool:
        """Whether every task of the epoch is leased, and some may be returned."""
        return self.current is self.training and not self.training.book.remaining

    def waiting_for(self) -> tuple[str, ...]:
        """Return the causes of the wait: workers by name, or "shards"."""
        if isinstance(self.current, Collecting) and self.current.done:
            return ("shards",)
        return self.current.waiting_for()

    def advance(self) -> bool:
        """Execute every transition that is due; return whether the epoch is over."""
        while True:
            if self.current is self.training and self.training.is_due_to_stand:
                self.current = Collecting(self.epoch, self._taking_part(), "train")
            if not self.current.done:
                return False
            if isinstance(self.current, Summarising if self._join is None else Validating):
                return True
            if not self._step():
                return False

    def finish(self, seconds: float) -> CallbackDecision | None:
        """Emit the end of the epoch; return the decision of the callbacks, if there are any."""
        if isinstance(self.current, Validating) and self._join is not None:
            self._merger.metrics, summary = self._join(self.current.answers), Summary({})
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
                self._stand(phase)
            elif not self._flushed:
                return False
            else:
                self._validate(phase)
        elif isinstance(phase, Validating):
            self._summarise(merge_metric_states(phase.answers))
        return True

    def _stand(self, collected: Collecting) -> None:
        """Publish the current state; emit that the job waits for the client and whether a step follows."""
        training = self.training
        self._merger.show(collected.untrained(training.counts), merge_metric_states(collected.metrics()))
        training.gate.stand(training.book.steps_finished)
        self.current = training
        self._effects.progress(self.epoch, training, pause=not training.book.done)

    def _collect(self, training: TrainingPhase) -> None:
        self._effects.progress(self.epoch, training)
        self._effects.add(FlushShards(self.epoch))
        self._flush_requested = True
        self.current = Collecting(self.epoch, self._taking_part())

    def _taking_part(self) -> dict[str, int]:
        return {m.name: m.index for m in self._members.in_epoch(self.epoch)}

    def _validate(self, collected: Collecting) -> None:
        self._merger.merge(collected.untrained(self.training.counts))
        self._metrics = merge_metric_states(collected.metrics())
        book = self._validation()
        if book is None:
            self._summarise(b"")
        else:
            self.current = Validating(self.epoch, book, self._merger.encoded, lambda: len(self._members.ready()))

    def _summarise(self, validation_metrics: bytes) -> None:
        logs = self.training.logs.mean()
        self._merger.metrics = validation_metrics or self._metrics
        steps = self.training.book.steps_finished
        self.current = Summarising(
            Summarise(self.epoch, self._metrics, validation_metrics, logs, steps, self._callbacks)
        )
