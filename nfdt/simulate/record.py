"""The record of a simulated job: its curves, staleness, and the work of its machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        samples: Number of samples trained in all epochs that have ended.
        seconds: Virtual seconds of training so far, all epochs together.
        dropped: Number of gradients that were not finite.
        groups: Time at which groups were formed, and data of the event.
    """

    points: list[Point] = field(default_factory=list)
    answered: list[tuple[str, int]] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    machines: dict[int, MachineUse] = field(default_factory=dict)
    samples: int = 0
    seconds: float = 0.0
    dropped: int = 0
    groups: list[tuple[float, Mapping[str, Any]]] = field(default_factory=list)

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

    def observe(self, at_s: float, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the job, if it is about progress, the end of an epoch, or groups."""
        if kind == "progress" and data.get("logs"):
            samples = self.samples + int(data["samples"])
            self.points.append(Point(at_s, samples, int(data["epoch"]), dict(data["logs"])))
        elif kind == "epoch_end":
            self.samples += int(data["samples"])
            self.seconds = at_s
            logs = {**data["logs"], **{f"val_{name}": value for name, value in (data["val_logs"] or {}).items()}}
            logs = {name: value for name, value in logs.items() if not isinstance(value, list)}
            self.points.append(Point(at_s, self.samples, int(data["epoch"]), logs, ends_epoch=True))
        elif kind == "groups":
            self.groups.append((at_s, dict(data)))

    @property
    def mean_staleness(self) -> float:
        """Mean number of updates that a gradient missed."""
        return sum(tau * n for tau, n in self.staleness.items()) / max(1, self.staleness.total())

    @property
    def most_staleness(self) -> int:
        """Maximum number of updates that a gradient missed."""
        return max(self.staleness, default=0)
