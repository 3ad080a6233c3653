"""Emulation of unequal machines and slow networks on one machine: options, and the resulting times and links."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Emulation(BaseModel):
    """Make one machine behave like several unequal ones. Empty: no emulation.

    A list has one value, which applies to every worker, or one value per worker. Values beyond the initial number of
    workers apply to those that join later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    slowdown: tuple[float, ...] = Field((), description="worker i computes slowdown[i] times slower")
    step_ms: tuple[float, ...] = Field(
        (), description="worker i takes at least step_ms[i] per batch of batch_size samples, less or more in proportion"
    )
    bandwidth_mbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (), description="millions of bits per second of worker i's link in each direction"
    )
    latency_ms: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="of worker i's link, in each direction"
    )
    devices: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(
        (), description="the processor of worker i is this number of devices; not on PyTorch"
    )
    fail: str | None = Field(
        None, pattern=r"^\d+@\d+(,\d+@\d+)*$", description="'2@30': worker 2 is killed at its step 30"
    )

    @field_validator("slowdown", "step_ms", "bandwidth_mbit", "latency_ms", "devices", mode="before")
    @classmethod
    def _one_for_all(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (int, float, str)) else value

    def link_of(self, worker: int) -> tuple[float | None, float]:
        """Return bandwidth in Mbit/s (None: not limited) and latency in ms of the link of worker number ``worker``."""
        return _of(worker, self.bandwidth_mbit), _of(worker, self.latency_ms) or 0.0

    def devices_of(self, worker: int) -> int | None:
        """Return how many devices the processor of worker number ``worker`` is to be; None: it is not emulated."""
        return None if (count := _of(worker, self.devices)) is None else int(count)

    def check_counts(self, workers: int) -> None:
        """Raise ValueError for a list that has neither one value nor one per worker."""
        for name, values in self.model_dump(exclude={"fail"}).items():
            if 1 < len(values) < workers:
                raise ValueError(
                    f"emulate.{name}: expected one value, which is for every worker, or one for each of {workers}. "
                    f"Received: {len(values)} values"
                )

    def last_steps(self, worker: int) -> frozenset[int]:
        """Return the steps at which worker number ``worker`` is to be killed."""
        ends = [tuple(map(int, one.split("@"))) for one in self.fail.split(",")] if self.fail else []
        return frozenset(step for killed, step in ends if killed == worker)

    def step_s(self, worker: int, measured_s: float, batch_share: float) -> float:
        """Return the emulated duration of a step of this worker, in seconds; never less than the measured one.

        Args:
            worker: Number of the worker; beyond the length of a list nothing is emulated.
            measured_s: Measured duration of the gradient, in seconds.
            batch_share: Ratio of the batch's size to the size that ``step_ms`` refers to.
        """
        wanted = measured_s
        if (slowdown := _of(worker, self.slowdown)) is not None:
            wanted = max(wanted, measured_s * slowdown)
        if (step_ms := _of(worker, self.step_ms)) is not None:
            wanted = max(wanted, step_ms / 1000 * batch_share)
        return wanted


def _of(worker: int, values: tuple[float, ...]) -> float | None:
    if len(values) == 1:
        return values[0]
    return values[worker] if worker < len(values) else None
