"""Handler interface for the effects of a coordinator, and the dispatch of an effect to its method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from nfdt.core.work import instructions as ins


class EffectHandler(Protocol):
    """Carries out the effects of one job, one method per kind."""

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event to the job's events."""

    def flush_shards(self, epoch: int) -> None:
        """Make every shard apply the gradients that it holds, then call ``Coordinator.flushed(epoch)``."""

    def forget_worker(self, worker: str, tasks: Sequence[int]) -> None:
        """Free the state of a lost worker on the shards, then call ``Coordinator.forgotten`` with what they applied."""

    def give_up(self, worker: str, reason: str) -> None:
        """End the process of a worker that sent nothing for too long."""

    def end_epoch(self, epoch: int, decision: ins.CallbackDecision | None) -> None:
        """Run the work between two epochs; ``decision`` is that of the callbacks of a detached job."""

    def fail(self, reason: str) -> None:
        """End the job as failed."""

    def finish(self) -> None:
        """Compose the result: all epochs are trained, or training was stopped."""


def carry_out(effect: ins.Effect, handler: EffectHandler) -> None:
    """Call the method of the handler that carries out this effect."""
    match effect:
        case ins.Emit(kind, data):
            handler.emit(kind, data)
        case ins.FlushShards(epoch):
            handler.flush_shards(epoch)
        case ins.ForgetWorker(worker, tasks):
            handler.forget_worker(worker, tasks)
        case ins.GiveUp(worker, reason):
            handler.give_up(worker, reason)
        case ins.EpochDone(epoch, decision):
            handler.end_epoch(epoch, decision)
        case ins.Failed(reason):
            handler.fail(reason)
        case ins.TrainingDone():
            handler.finish()
