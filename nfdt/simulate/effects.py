"""The effects of a simulated job's coordinator, carried out at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.events import Event
from nfdt.simulate.record import Record
from nfdt.simulate.roster import WorkerRoster
from nfdt.simulate.shards import LocalShards
from nfdt.simulate.waiting import WaitingWorkers


class BetweenEpochs(Protocol):
    """Forms other workers between two epochs, where that pays."""

    def review(self) -> None:
        """Look at the workers after an epoch."""
        ...


class SimulatedEffects:
    """Keeps the events of a job and carries out what its coordinator asks for.

    Args:
        coordinator: Asks for effects.
        roster: The workers.
        waiting: Those that wait for an instruction.
        shards: The stores.
        record: Measured times, losses and delays.
        now: Returns the virtual time in seconds.
        result: Returns the data of the result's event.

    Attributes:
        events: All events so far.
        ended: Whether the job is over.
        between_epochs: Reviews the workers after each epoch; set before the first effect.
    """

    between_epochs: BetweenEpochs

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
        """Append an event, and note it in the record."""
        now = self._now()
        if kind == "progress":
            self._record.progressed(now, data)
        elif kind == "epoch_end":
            self._record.epoch_ended(now, data)
        elif kind == "groups":
            self._record.grouped(now, data)
        self.events.append(Event(len(self.events) + 1, now, kind, dict(data)))  # type: ignore[arg-type]

    def flush_shards(self, epoch: int) -> None:
        """Apply what the stores hold."""
        self._shards.flush()
        self._coordinator.flushed(epoch)

    def forget_worker(self, worker: str) -> None:
        """Free what the stores keep for a lost worker."""
        self._waiting.remove(worker)
        self._shards.forget(worker)

    def give_up(self, worker: str, reason: str) -> None:
        """End a worker that was silent too long."""
        self._roster.lose(worker, reason)

    def end_epoch(self, epoch: int) -> None:
        """Form other workers, where that pays."""
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
