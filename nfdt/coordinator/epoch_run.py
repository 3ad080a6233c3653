"""One epoch from its first task to its event: train, collect, validate, summarise."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.coordinator.instructions import FlushShards, Summarise
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.merging import StateMerger, merged_metrics
from nfdt.coordinator.outbox import Outbox
from nfdt.coordinator.phases import Collecting, Phase, Summarising, Training, Validating
from nfdt.schedulers import LeaseBook


class EpochRun:
    """The phases of one epoch, one after the other.

    ::

        train --all tasks done--> collect --states in, shards flushed--> validate, if it does --> summarise

    Attributes:
        current: The phase that is on.
    """

    def __init__(
        self,
        epoch: int,
        training: Training,
        members: Membership,
        merger: StateMerger,
        outbox: Outbox,
        validation: Callable[[], LeaseBook | None],
    ) -> None:
        self.epoch = epoch
        self.current: Phase = training
        self.training = training
        self._members = members
        self._merger = merger
        self._outbox = outbox
        self._validation = validation
        self._flushed = False
        self._metrics = b""

    def flushed(self) -> None:
        """The shards have applied everything of this epoch."""
        self._flushed = True

    def waiting_for(self) -> tuple[str, ...]:
        """Whose work is outstanding: workers by name, or "shards"."""
        if isinstance(self.current, Collecting) and self.current.done:
            return ("shards",)
        return self.current.waiting_for()

    def advance(self) -> bool:
        """Take every transition that is due; whether the epoch is over."""
        while self.current.done:
            if isinstance(self.current, Summarising):
                return True
            if not self._step():
                return False
        return False

    def finish(self, seconds: float) -> None:
        """Tell the world about the epoch's end."""
        assert isinstance(self.current, Summarising)
        summary = self.current.summary
        assert summary is not None
        book = self.training.book
        self._outbox.emit(
            "epoch_end",
            epoch=self.epoch,
            logs=dict(summary.logs),
            val_logs=dict(summary.val_logs) if summary.val_logs is not None else None,
            seconds=seconds,
            steps=book.steps_finished,
            samples=book.samples_finished,
        )

    def _step(self) -> bool:
        phase = self.current
        if isinstance(phase, Training):
            self._collect(phase)
        elif isinstance(phase, Collecting):
            if not self._flushed:
                return False
            self._validate(phase)
        elif isinstance(phase, Validating):
            self._summarise(merged_metrics(phase.metrics))
        return True

    def _collect(self, training: Training) -> None:
        self._outbox.progress(self.epoch, training)
        self._outbox.add(FlushShards(self.epoch))
        self.current = Collecting(self.epoch, {m.name: m.index for m in self._members.in_epoch(self.epoch)})

    def _validate(self, collected: Collecting) -> None:
        self._merger.merge(collected.untrained())
        self._metrics = merged_metrics(collected.metrics())
        book = self._validation()
        if book is None:
            self._summarise(b"")
        else:
            self.current = Validating(self.epoch, book, self._merger.encoded, lambda: len(self._members.ready()))

    def _summarise(self, validation_metrics: bytes) -> None:
        logs = self.training.logs.mean()
        self.current = Summarising(Summarise(self.epoch, self._metrics, validation_metrics, logs))
