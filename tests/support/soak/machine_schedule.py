"""Schedule of faults on several machines, as TOML. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from random import Random
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from nfdt.chaos.schedule import ROLES, ClusterRow, PlannedFault, TargetRole

MachineFaultKind = Literal["power", "pause", "cut", "slow", "lose", "corrupt", "kill", "stall", "terminate"]
# Pairs of kind and role that can be drawn.
MACHINE_PAIRS: tuple[tuple[MachineFaultKind, TargetRole], ...] = tuple(
    (kind, role) for kind in get_args(MachineFaultKind) for role in ROLES
)
# Least and most of what each kind needs besides its duration; of several, one is drawn.
AMOUNTS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "slow": {"mbit": (1.0, 20.0), "delay_ms": (5.0, 100.0)},
    "lose": {"percent": (1.0, 10.0)},
    "corrupt": {"percent": (1.0, 10.0)},
}


class MachineFault(BaseModel):
    """One fault of a machine of a role, or of a process of that role.

    Attributes:
        kind: ``power``: all processes of the machine end without a message, and start again after ``seconds``.
            ``pause``: all processes of the machine stand still for ``seconds``.
            ``cut``, ``slow``, ``lose``, ``corrupt``: for ``seconds``, the link carries nothing, little or late,
            not all packets, or changed ones.
            ``kill``, ``stall``: as in ``nfdt chaos``, for one process.
            ``terminate``: SIGTERM to the command of the machine, which starts again ``seconds`` after its end.
        role: Role of the machine or of the process.
        target: Number among those of the role; None: a random one.
        at_s: Seconds after the first trained step.
        seconds: Duration.
        mbit: Rate of a slow link.
        delay_ms: Delay of a slow link, in each direction.
        percent: Part of the packets, in each direction.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: MachineFaultKind
    role: TargetRole
    target: int | None = None
    at_s: float = Field(ge=0)
    seconds: float = Field(gt=0)
    mbit: float | None = Field(None, gt=0)
    delay_ms: float = Field(0.0, ge=0)
    percent: float = Field(0.0, ge=0, le=100)


class MachineSchedule(BaseModel):
    """Schedule for a cluster whose server, script, workers and shards have a machine each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    cluster: ClusterRow = ClusterRow()
    fault: tuple[MachineFault, ...] = ()

    def plan(self) -> list[PlannedFault]:
        """Return all faults by their times."""
        rows = sorted(self.fault, key=lambda row: row.at_s)
        draws = [Random(f"{self.seed} {number}").random() for number, _ in enumerate(rows, 1)]
        return [
            PlannedFault(n, row, row.at_s, None, draw) for n, (row, draw) in enumerate(zip(rows, draws, strict=True), 1)
        ]


def parse_machine_schedule(text: str) -> MachineSchedule:
    """Return the schedule in a TOML text."""
    return MachineSchedule.model_validate(tomllib.loads(text))
