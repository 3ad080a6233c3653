"""Options of Horovod: tuning, timeline and elastic membership of an allreduce ring's ranks."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from nfdt.core.specs.read_with import ReadWith

CODECS = ("identity", "fp16", "bf16")  # codecs of the gradients in an allreduce ring
NEWS = "ring news: "  # prefix of the log lines of ranks that become events of their job
MOST_COOLDOWN_S = 600
GLOO_TIMEOUT_S = 60  # limit of the ranks' wait for a rank that is starting, and for an unresponsive host
PATH = r"^[^-]"  # never an option of a launcher
ANY_WORLD = ReadWith(topology=("ring", "groups"))  # topologies with Horovod
LATER_WORLDS = ReadWith(plan=("topology",))  # the plan may choose groups while the job trains
RING = ReadWith(topology=("ring",))
FREE = ReadWith(topology=("flat",), consistency=("free",))
ELASTIC = ReadWith(topology=("ring",), elastic=(True,))
_TUNING = (  # option, environment variable of Horovod, argument of horovodrun
    ("fusion_threshold_mb", "HOROVOD_FUSION_THRESHOLD", "--fusion-threshold-mb"),
    ("cycle_time_ms", "HOROVOD_CYCLE_TIME", "--cycle-time-ms"),
    ("autotune_log", "HOROVOD_AUTOTUNE_LOG", "--autotune-log-file"),
    ("timeline", "HOROVOD_TIMELINE", "--timeline-filename"),
    ("stall_warning_s", "HOROVOD_STALL_CHECK_TIME_SECONDS", "--stall-check-warning-time-seconds"),
    ("stall_shutdown_s", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "--stall-check-shutdown-time-seconds"),
)


class RingTuning(BaseModel):
    """Tuning and timeline options of Horovod. Empty: Horovod's own defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fusion_threshold_mb: Annotated[int | None, ANY_WORLD, LATER_WORLDS] = Field(
        None, ge=0, le=65536, description="allreduce: small tensors are reduced together up to this size, in MiB"
    )
    cycle_time_ms: Annotated[float | None, ANY_WORLD, LATER_WORLDS] = Field(
        None, gt=0, le=10_000, description="allreduce: how often Horovod looks for tensors to reduce, in ms"
    )
    autotune: Annotated[bool, ANY_WORLD, LATER_WORLDS] = Field(
        False, description="allreduce: let Horovod search for both while it trains"
    )
    autotune_log: Annotated[str | None, RING] = Field(
        None, pattern=PATH, description="allreduce: a CSV file of what autotune tried"
    )
    timeline: Annotated[str | None, RING] = Field(
        None, pattern=PATH, description="allreduce: a trace of all reductions, for Perfetto"
    )
    stall_warning_s: Annotated[int | None, ANY_WORLD, LATER_WORLDS] = Field(
        None, ge=1, description="allreduce: seconds after which ranks that keep others waiting are named; None: 60"
    )
    stall_shutdown_s: Annotated[int | None, ANY_WORLD, LATER_WORLDS] = Field(
        None, ge=1, description="allreduce: seconds after which they end the ring; None: never"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.autotune_log and not self.autotune:
            raise ValueError("autotune_log: expected autotune=True with it")
        warning_s = self.stall_warning_s or 60
        if self.stall_shutdown_s is not None and self.stall_shutdown_s < warning_s:
            raise ValueError(f"stall_shutdown_s: expected at least stall_warning_s, {warning_s}")
        return self

    def variables(self) -> dict[str, str]:
        """Return the equivalent environment variables of Horovod."""
        values = {variable: getattr(self, option) for option, variable, _ in _TUNING}
        if self.fusion_threshold_mb is not None:
            # Horovod reads bytes from the environment, and MiB from its arguments.
            values["HOROVOD_FUSION_THRESHOLD"] = self.fusion_threshold_mb * 2**20
        if self.autotune:
            values["HOROVOD_AUTOTUNE"] = 1
        return {name: str(value) for name, value in values.items() if value is not None}

    def tuning_flags(self) -> list[str]:
        """Return the equivalent arguments of ``horovodrun``."""
        flags = _arguments({flag: getattr(self, option) for option, _, flag in _TUNING})
        return ["--autotune", *flags] if self.autotune else flags


class RingElastic(BaseModel):
    """Elastic membership: whether ranks may join and leave while a job trains, and the limits of their number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_workers: Annotated[int | None, RING, FREE] = Field(
        None,
        ge=1,
        description="begin with so many, and give up others for jobs that wait; allreduce: ranks may die down to "
        "this number, which makes the ring elastic",
    )
    max_workers: Annotated[int | None, RING] = Field(
        None, ge=1, description="allreduce: elastic: ranks may become this many"
    )
    host_discovery_script: Annotated[str | None, RING] = Field(
        None, pattern=PATH, description="allreduce: elastic: a program that prints the hosts there are, 'a:2' each"
    )
    network_interfaces: Annotated[str | None, ELASTIC] = Field(
        None,
        pattern=r"^[A-Za-z0-9][\w.,-]*$",
        description="allreduce: elastic: 'eth0', where the script's hosts are reached; None: this machine only",
    )
    commit_steps: Annotated[int, ELASTIC] = Field(
        10, ge=1, description="allreduce: elastic: steps between two copies of the state; later ones are redone"
    )
    elastic_timeout_s: Annotated[int, ELASTIC] = Field(
        120, ge=1, description="allreduce: elastic: how long there may be fewer than min_workers"
    )
    reset_limit: Annotated[int | None, ELASTIC] = Field(
        None, ge=1, description="allreduce: elastic: how often ranks may come or go; None: any number of times"
    )
    host_cooldown_s: Annotated[int, ELASTIC] = Field(
        2,
        ge=1,
        le=MOST_COOLDOWN_S,
        description="allreduce: elastic: pause of a host whose rank died; twice as long each time",
    )

    @property
    def elastic(self) -> bool:
        """Whether ranks may join and leave."""
        return (self.min_workers or self.max_workers or self.host_discovery_script) is not None

    def elastic_flags(self) -> list[str]:
        """Return the equivalent arguments of ``horovodrun``, except the placement of ranks."""
        values = {
            "--min-np": self.min_workers,
            "--max-np": self.max_workers,
            "--host-discovery-script": shlex.quote(self.host_discovery_script) if self.host_discovery_script else None,
            "--network-interfaces": self.network_interfaces,
            "--elastic-timeout": self.elastic_timeout_s,
            "--gloo-timeout-seconds": GLOO_TIMEOUT_S,
            "--reset-limit": self.reset_limit,
        }
        return [*_arguments(values), "--blacklist-cooldown-range", str(self.host_cooldown_s), str(MOST_COOLDOWN_S)]


def _arguments(values: Mapping[str, object]) -> list[str]:
    return [part for name, value in values.items() if value is not None for part in (name, str(value))]
