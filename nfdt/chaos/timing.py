"""Times of the faults of a schedule: the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, Protocol, TypeVar

from nfdt.chaos.schedule import FaultRow, Schedule, TargetRole

_Drawn = TypeVar("_Drawn")


class FaultFields(Protocol):
    """Fields that the row of every kind of fault has."""

    @property
    def kind(self) -> str:
        """Kind of fault."""

    @property
    def role(self) -> TargetRole:
        """Role of its target."""

    @property
    def seconds(self) -> float | None:
        """Duration; None: it has none."""


_Fields = TypeVar("_Fields", bound=FaultFields)


@dataclass(frozen=True)
class PlannedFault(Generic[_Fields]):
    """One fault at one time.

    Attributes:
        number: Its place in the plan, from 1 on.
        row: Its row of the schedule.
        at_s: Seconds after the first trained step; None: see ``at_step``.
        at_step: Number of steps of the job after which it is due; None: see ``at_s``.
        draw: Random number in [0, 1) that chooses the target and the byte.
    """

    number: int
    row: _Fields
    at_s: float | None
    at_step: int | None
    draw: float

    def is_due(self, elapsed_s: float, steps: int) -> bool:
        """Whether the time of the fault has come."""
        return elapsed_s >= self.at_s if self.at_s is not None else steps >= (self.at_step or 0)

    def choose(self, candidates: Sequence[_Drawn]) -> _Drawn:
        """Return the candidate that the draw chooses; there is at least one."""
        return candidates[int(self.draw * len(candidates))]


def plan_faults(schedule: Schedule) -> list[PlannedFault[FaultRow]]:
    """Return all faults of a schedule: those at a time by their times, then those at a step."""
    found: list[tuple[FaultRow, float | None, int | None, float]] = []
    for index, row in enumerate(schedule.fault):
        random = Random(f"{schedule.seed} {index}")
        if row.random is None:
            found.append((row, row.at_s, row.at_step, random.random()))
            continue
        at_s = 0.0
        for _ in range(row.random.count):
            at_s += random.uniform(*row.random.every_s)
            found.append((row, at_s, None, random.random()))
    found.sort(key=lambda one: (one[1] is None, one[1] or 0.0, one[2] or 0))
    return [PlannedFault(number, *one) for number, one in enumerate(found, 1)]
