"""Schedules of faults: the TOML file of ``nfdt chaos``, and the times of its faults, which the seed determines."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import MAX_SHARDS, MAX_WORKERS

FaultKind = Literal["kill", "stall", "terminate", "cut", "slow", "corrupt", "fill_disk"]
TargetRole = Literal["worker", "shard", "server", "client"]
ROLES: tuple[TargetRole, ...] = get_args(TargetRole)
RESTARTED: tuple[TargetRole, ...] = ("server", "client")  # `nfdt chaos` starts them again; launchers start the others
CLOCK = (
    "clock: the wall clock belongs to the whole machine, so it is not set here. No wait of NFDT depends on it: all use "
    "the monotonic clock. Remove the fault"
)
_Drawn = TypeVar("_Drawn")


@dataclass(frozen=True)
class KindFacts:
    """Roles and fields of one kind of fault.

    Attributes:
        roles: Roles of the processes that it can hit.
        needs: Fields that it needs.
        takes: Other fields that it can have; of those with one_of, it needs at least one.
        one_of: Whether it needs one of ``takes``.
    """

    roles: tuple[TargetRole, ...]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    one_of: bool = False


LINKED: tuple[TargetRole, ...] = ("worker", "client")  # their connections to the server pass through a relay
KINDS: Mapping[FaultKind, KindFacts] = {
    "kill": KindFacts(ROLES, takes=("seconds",)),
    "terminate": KindFacts(ROLES, takes=("seconds",)),
    "stall": KindFacts(ROLES, needs=("seconds",)),
    "cut": KindFacts(LINKED, needs=("seconds",)),
    "slow": KindFacts(LINKED, needs=("seconds",), takes=("mbit", "delay_ms"), one_of=True),
    "corrupt": KindFacts(LINKED),
    "fill_disk": KindFacts(("server",), needs=("seconds",)),
}
_AMOUNTS = ("seconds", "mbit", "delay_ms")


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterRow(_Row):
    """The cluster: numbers of workers and shards, TLS, and any options of ``nfdt run``."""

    workers: int = Field(2, ge=1, le=MAX_WORKERS)
    shards: int = Field(1, ge=1, le=MAX_SHARDS)
    tls: bool = False
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)


class RandomTimes(_Row):
    """``count`` faults, each ``every_s`` = [least, most] seconds after the one before."""

    every_s: tuple[float, float]
    count: int = Field(ge=1, le=10_000)

    @field_validator("every_s")
    @classmethod
    def _in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] <= value[1]:
            raise ValueError("expected [least, most] with 0 <= least <= most")
        return value


class FaultRow(_Row):
    """One ``[[fault]]``: its kind, its target, and its time."""

    kind: FaultKind
    role: TargetRole
    target: int | Literal["random"] = "random"
    seconds: float | None = Field(None, gt=0, le=86400)
    mbit: float | None = Field(None, gt=0)
    delay_ms: float | None = Field(None, gt=0)
    at_s: float | None = Field(None, ge=0)
    at_step: int | None = Field(None, ge=0)
    random: RandomTimes | None = None

    @field_validator("kind", mode="before")
    @classmethod
    def _without_clock(cls, value: Any) -> Any:
        if value == "clock":
            raise ValueError(CLOCK)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        facts = KINDS[self.kind]
        if self.role not in facts.roles:
            raise ValueError(f"{self.kind}: expected role {' or '.join(facts.roles)}")
        for name in facts.needs:
            if getattr(self, name) is None:
                raise ValueError(f"{self.kind}: expected {name}")
        for name in _AMOUNTS:
            if getattr(self, name) is not None and name not in (*facts.needs, *facts.takes):
                raise ValueError(f"{self.kind}: expected no {name}, which it does not use")
        if facts.one_of and all(getattr(self, name) is None for name in facts.takes):
            raise ValueError(f"{self.kind}: expected {' or '.join(facts.takes)}")
        if "seconds" in facts.takes and self.seconds is not None and self.role not in RESTARTED:
            raise ValueError(
                f"{self.kind} of a {self.role}: expected no seconds, because its launcher starts another one at once"
            )
        if isinstance(self.target, int) and (self.target < 0 or (self.role in RESTARTED and self.target != 0)):
            raise ValueError(f"target: expected an index from 0 on; there is one {self.role}")
        if sum(when is not None for when in (self.at_s, self.at_step, self.random)) != 1:
            raise ValueError("expected one of at_s, at_step and random")
        return self


class Schedule(_Row):
    """Schedule of a trial: the seed, the cluster and the faults."""

    seed: int = 0
    cluster: ClusterRow = ClusterRow()
    fault: tuple[FaultRow, ...] = ()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        counts = {"worker": self.cluster.workers, "shard": self.cluster.shards}
        for number, fault in enumerate(self.fault, 1):
            if fault.kind == "corrupt" and not self.cluster.tls:
                raise ValueError(
                    f"fault {number}: corrupt: expected tls = true in [cluster], because only TLS detects a byte that "
                    "was changed on its way"
                )
            if isinstance(fault.target, int) and fault.target >= (most := counts.get(fault.role, 1)):
                raise ValueError(f"fault {number}: target: expected less than {most}, the number of {fault.role}s")
        return self


def read_schedule(path: Path) -> Schedule:
    """Return the schedule of a TOML file.

    Raises:
        UsageError: The file cannot be read, is no TOML, or has unknown or contradictory fields.
    """
    try:
        return parse_schedule(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"Schedule {path}: expected a file that can be read. Received: {error.strerror}.") from None
    except UsageError as error:
        raise UsageError(f"Schedule {path}: {error}") from None


def parse_schedule(text: str) -> Schedule:
    """Return the schedule in a TOML text.

    Raises:
        UsageError: The text is no TOML, or has unknown or contradictory fields.
    """
    try:
        return Schedule.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"expected TOML. Received: {error}.") from None
    except ValidationError as error:
        raise UsageError(" ".join(map(_explain, error.errors()))) from None


_FIELDS: Mapping[str, type[BaseModel]] = {
    "": Schedule,
    "cluster": ClusterRow,
    "fault": FaultRow,
    "random": RandomTimes,
}


def _explain(item: Any) -> str:
    """Return one error of pydantic with its place; rows of faults count from 1."""
    where = [str(part + 1) if isinstance(part, int) else part for part in item["loc"]]
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        room = next((part for part in reversed(where[:-1]) if part in _FIELDS), "")
        message = f"unknown. Expected one of: {', '.join(_FIELDS[room].model_fields)}"
    place = f"{'.'.join(where)}: " if where else ""
    received = "" if isinstance(item["input"], dict | Schedule) else f" Received: {item['input']!r}."
    return f"{place}{message}.{received}"


@dataclass(frozen=True)
class PlannedFault:
    """One fault at one time.

    Attributes:
        number: Its place in the plan, from 1 on.
        row: Its row of the schedule: a :class:`FaultRow`, or that of another kind of schedule with ``kind``, ``role``
            and ``seconds``.
        at_s: Seconds after the first trained step; None: see ``at_step``.
        at_step: Number of steps of the job after which it is due; None: see ``at_s``.
        draw: Random number in [0, 1) that chooses the target and the byte.
    """

    number: int
    row: Any
    at_s: float | None
    at_step: int | None
    draw: float

    def is_due(self, elapsed_s: float, steps: int) -> bool:
        """Whether the time of the fault has come."""
        return elapsed_s >= self.at_s if self.at_s is not None else steps >= (self.at_step or 0)

    def choose(self, candidates: Sequence[_Drawn]) -> _Drawn:
        """Return the candidate that the draw chooses; there is at least one."""
        return candidates[int(self.draw * len(candidates))]


def plan_faults(schedule: Schedule) -> list[PlannedFault]:
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
