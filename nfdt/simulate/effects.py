"""Execution of the effects of a simulated job's coordinator, without delay, and the record of the simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.events import Event
from nfdt.core.work import instructions as ins
from nfdt.simulate.post_plan import Regrouping
from nfdt.simulate.roster import WaitingWorkers, WorkerRoster
from nfdt.simulate.shards import LocalShards
from nfdt.transport.base import Pushed


@dataclass(frozen=True)
class Point:
    """One point of the curves.

    Attributes:
        at_s: Virtual seconds since training began.
        samples: Number of samples trained by then, in all epochs.
        epoch: Index of the epoch, counted from 0.
        logs: Running logs of the epoch, or at its end its logs with those of the validation as ``val_*``;
            numbers, no arrays.
        ends_epoch: Whether the point is the epoch's end.
    """

    at_s: float
    samples: int
    epoch: int
    logs: Mapping[str, float]
    ends_epoch: bool = False


@dataclass
class MachineUse:
    """Work of one machine: samples, steps, and virtual seconds of computing."""

    samples: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass
class Record:
    """Measurements collected while a job is simulated.

    Attributes:
        points: Points of the curves, in order.
        answered: (worker, task) of every push, in the order of the replies.
        staleness: Number of gradients by the number of updates they missed.
        machines: Work of each machine, by its number.
        seconds: Virtual seconds of training so far, all epochs together.
        dropped: Number of gradients that were not finite.
        groups: Time at which groups were formed, and data of the event.
    """

    points: list[Point] = field(default_factory=list)
    answered: list[tuple[str, int]] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    machines: dict[int, MachineUse] = field(default_factory=dict)
    seconds: float = 0.0
    dropped: int = 0
    groups: list[tuple[float, Mapping[str, Any]]] = field(default_factory=list)
    _samples: int = 0

    # ---- calls from workers

    def applied(self, worker: str, task: int, pushed: Pushed) -> None:
        """Record that the reply to a push has arrived."""
        self.staleness[pushed.staleness] += 1
        self.dropped += not pushed.applied
        self.answered.append((worker, task))

    def member_stepped(self, machine: int, samples: int, seconds: float) -> None:
        """Record that one machine has done its part of a step."""
        use = self.machines.setdefault(machine, MachineUse())
        use.samples += samples
        use.steps += 1
        use.busy_s += seconds

    # ---- the job's events

    def progressed(self, at_s: float, data: Mapping[str, Any]) -> None:
        """Record a ``progress`` event."""
        logs = dict(data.get("logs") or {})
        if logs:
            self.points.append(Point(at_s, self._samples + int(data["samples"]), int(data["epoch"]), logs))

    def epoch_ended(self, at_s: float, data: Mapping[str, Any]) -> None:
        """Record an ``epoch_end`` event."""
        self._samples += int(data["samples"])
        self.seconds = at_s
        logs = {**data["logs"], **{f"val_{name}": value for name, value in (data["val_logs"] or {}).items()}}
        logs = {name: value for name, value in logs.items() if not isinstance(value, list)}
        self.points.append(Point(at_s, self._samples, int(data["epoch"]), logs, ends_epoch=True))

    def grouped(self, at_s: float, data: Mapping[str, Any]) -> None:
        """Record a ``groups`` event."""
        self.groups.append((at_s, dict(data)))

    @property
    def samples(self) -> int:
        """Number of samples trained in all epochs that have ended."""
        return self._samples

    @property
    def mean_staleness(self) -> float:
        """Mean number of updates that a gradient missed."""
        return sum(tau * n for tau, n in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def most_staleness(self) -> int:
        """Maximum number of updates that a gradient missed."""
        return max(self.staleness, default=0)


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
