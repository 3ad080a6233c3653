"""Unequal machines and slow networks on one machine: options, and what they come to."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Emulation(BaseModel):
    """Make one machine behave like several unequal ones. Empty: no emulation."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slowdown: tuple[float, ...] = Field((), description="worker i computes slowdown[i] times slower")
    step_ms: tuple[float, ...] = Field(
        (), description="worker i takes at least step_ms[i] per batch of batch_size samples, less or more in proportion"
    )
    bandwidth_mbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="millions of bits per second of worker i's link in each direction; one value is for all workers"
    )
    latency_ms: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="of worker i's link, in each direction; one value is for all workers"
    )
    fail: str | None = Field(
        None, pattern=r"^\d+@\d+(,\d+@\d+)*$", description="'2@30': worker 2 is killed at its step 30"
    )

    @field_validator("bandwidth_mbit", "latency_ms", mode="before")
    @classmethod
    def _one_for_all(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (int, float, str)) else value

    def link_of(self, worker: int) -> tuple[float | None, float]:
        """Bandwidth in Mbit/s (None: not limited) and latency in ms of worker number ``worker``'s link."""

        def of(values: tuple[float, ...]) -> float | None:
            return values[0] if len(values) == 1 else values[worker] if worker < len(values) else None

        return of(self.bandwidth_mbit), of(self.latency_ms) or 0.0

    def step_s(self, worker: int, measured_s: float, batch_share: float) -> float:
        """How long a step of this worker shall take, in seconds; never less than it took.

        Args:
            worker: Its number; beyond the options' length nothing is emulated.
            measured_s: What the gradient really took.
            batch_share: The batch's size over the one that ``step_ms`` is meant for.
        """
        wanted = measured_s
        if worker < len(self.slowdown):
            wanted = max(wanted, measured_s * self.slowdown[worker])
        if worker < len(self.step_ms):
            wanted = max(wanted, self.step_ms[worker] / 1000 * batch_share)
        return wanted
