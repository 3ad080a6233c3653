"""Execution of the effects of a simulated job's coordinator, without delay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.events import Event
from nfdt.core.work import instructions as ins
from nfdt.simulate.post_plan import Regrouping
from nfdt.simulate.record import Record
from nfdt.simulate.roster import WaitingWorkers, WorkerRoster
from nfdt.simulate.shards import LocalShards


class SimulatedEffects:
    """Store of a job's events, and executor of the effects that its coordinator requests.

    Args:
        coordinator: The coordinator that requests the effects.
        roster: The workers.
        waiting: Workers that wait for an instruction.
        shards: The stores.
        record: Measured times, losses and delays.
        now: Returns the virtual time in seconds.
        result: Returns the data of the result's event.

    Attributes:
        events: All events so far.
        ended: Whether the job is over.
        between_epochs: Reviews the workers after each epoch; set before the first effect.
    """

    between_epochs: Regrouping

    def __init__(
        self,
        coordinator: Coordinator,
        roster: WorkerRoster,
        waiting: WaitingWorkers,
        shards: LocalShards,
        record: Record,
        now: Callable[[], float],
        result: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.events: list[Event] = []
        self.ended = False
        self._coordinator, self._roster, self._waiting = coordinator, roster, waiting
        self._shards, self._record, self._now, self._result = shards, record, now, result

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event and add it to the record."""
        now = self._now()
        if kind == "progress":
            self._record.progressed(now, data)
        elif kind == "epoch_end":
            self._record.epoch_ended(now, data)
        elif kind == "groups":
            self._record.grouped(now, data)
        self.events.append(Event(len(self.events) + 1, now, kind, dict(data)))  # type: ignore[arg-type]

    def flush_shards(self, epoch: int) -> None:
        """Apply the gradients that the stores hold."""
        self._shards.flush()
        self._coordinator.flushed(epoch)

    def forget_worker(self, worker: str, tasks: Sequence[int]) -> None:
        """Free the state that the stores keep for a lost worker; tasks that they have applied are not done again."""
        self._waiting.remove(worker)
        self._coordinator.forgotten(worker, self._shards.forget(worker, tasks))

    def give_up(self, worker: str, reason: str) -> None:
        """End a worker that sent nothing for too long."""
        self._roster.lose(worker, reason)

    def end_epoch(self, epoch: int, decision: ins.CallbackDecision | None) -> None:
        """Form other workers, if that saves time; simulated jobs have no callbacks on workers."""
        self.between_epochs.review()

    def fail(self, reason: str) -> None:
        """End the job as failed."""
        self._end("failed", reason)

    def finish(self) -> None:
        """End the job with its result."""
        self.emit("result", self._result())
        self._end("succeeded", None)

    def _end(self, state: str, reason: str | None) -> None:
        self.emit("state", {"state": state, "reason": reason, "error": None})
        self.ended = True
