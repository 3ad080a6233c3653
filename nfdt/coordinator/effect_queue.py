"""Queue of pending effects, with progress events at a limited rate and stall events."""

from __future__ import annotations

from typing import Any

from nfdt.coordinator.progress import StallWatch, Throttle
from nfdt.coordinator.training import TrainingPhase
from nfdt.core.work.instructions import Effect, Emit

STALL_AFTER_S = 15.0


class EffectQueue:
    """Ordered queue of effects, emptied by :meth:`drain`."""

    def __init__(self, now: float) -> None:
        self._effects: list[Effect] = []
        self._throttle = Throttle()
        self._stall = StallWatch(now, STALL_AFTER_S)

    def add(self, effect: Effect) -> None:
        """Append an effect."""
        self._effects.append(effect)

    def emit(self, kind: str, **data: Any) -> None:
        """Append an event."""
        self.add(Emit(kind, data))

    def withdraw(self, effect: Effect) -> bool:
        """Remove an effect unless it is drained already; return whether it was removed."""
        found = effect in self._effects
        self._effects = [each for each in self._effects if each != effect]
        return found

    def progress(self, epoch: int, training: TrainingPhase, **more: Any) -> None:
        """Emit a progress event at once."""
        book = training.book
        self.emit(
            "progress",
            epoch=epoch,
            steps=book.steps_finished,
            samples=book.samples_finished,
            logs=training.logs.mean(),
            **more,
        )

    def progressed(self, now: float, epoch: int, training: TrainingPhase | None) -> None:
        """Record progress and emit it if it is due; the last event of a phase is always emitted."""
        self._stall.useful(now)
        if training is not None and not training.done and self._throttle.is_due(now, len(training.logs)):
            self.progress(epoch, training)

    def stall(self, now: float, waiting_for: tuple[str, ...]) -> None:
        """Emit a stalled event after a long time without progress. Waiting for the client is no stall."""
        since_s = self._stall.stalled_s(now)
        if since_s is not None and waiting_for != ("client",):
            self.emit("stalled", waiting_for=list(waiting_for), since_s=since_s)

    def __bool__(self) -> bool:
        """Return whether there are effects."""
        return bool(self._effects)

    def drain(self) -> list[Effect]:
        """Return all effects since the last call."""
        effects, self._effects = self._effects, []
        return effects
