"""The content of ``cluster.toml``: machines, links, shards. Invalid content is refused with the expected one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nfdt.core.errors import UsageError
from nfdt.core.specs.job import MAX_SHARDS, MAX_WORKERS
from nfdt.schedulers.throughput import StepTime

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class _ClusterTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PauseDescription(_ClusterTable):
    """Interval in which the machine computes nothing."""

    at_s: NonNegative
    seconds: Positive


class Drift(_ClusterTable):
    """Slowdown from a point in time on: every step takes ``slowdown`` times its described duration."""

    at_s: NonNegative
    slowdown: Positive


class LinkDescription(_ClusterTable):
    """A network link; each direction carries one message after the other.

    Attributes:
        bandwidth_mbit: Millions of bits per second in each direction; None: not limited.
        latency_ms: Latency in each direction.
    """

    bandwidth_mbit: Positive | None = None
    latency_ms: NonNegative = 0.0

    @property
    def s_per_byte(self) -> float:
        """Seconds of a byte in each direction; 0: not limited."""
        return 8e-6 / self.bandwidth_mbit if self.bandwidth_mbit else 0.0


class Workers(LinkDescription):
    """A number of equal workers, each with a link of its own.

    Attributes:
        count: Number of workers.
        step_ms: Average milliseconds of a gradient of the script's batch size.
        overhead_ms: The part of ``step_ms`` that does not depend on the batch size.
        speed: Speed relative to the machine that measures the script's steps; replaces ``step_ms``.
        jitter: Sigma of the log-normal factor, of mean 1, that every step's time is multiplied by.
        drift: Changes of speed, in order.
        pauses: Intervals without computation.
        fails_at_s: Time at which the worker is lost; None: never.
        returns_after_s: Seconds from the loss until another worker replaces it; None: it is not replaced.
        link: Name of a link under ``[links]`` that the workers share with others.
        machine: Name of the machine that all these workers are on; empty: each has its own. Rings of allreduce on one
            machine do not use its link.
    """

    count: int = Field(1, ge=1, le=MAX_WORKERS)
    step_ms: Positive | None = None
    overhead_ms: NonNegative = 0.0
    speed: Positive | None = None
    jitter: float = Field(0.0, ge=0, le=2)
    drift: tuple[Drift, ...] = ()
    pauses: tuple[PauseDescription, ...] = ()
    fails_at_s: NonNegative | None = None
    returns_after_s: NonNegative | None = None
    link: str | None = None
    machine: str = ""

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if (self.step_ms is None) == (self.speed is None):
            raise ValueError("step_ms, speed: expected one of them")
        if self.step_ms is None and self.overhead_ms:
            raise ValueError("overhead_ms: expected step_ms with it; with speed it is measured")
        if self.step_ms is not None and self.overhead_ms >= self.step_ms:
            raise ValueError(f"overhead_ms: expected less than step_ms={self.step_ms:g}")
        times = [drift.at_s for drift in self.drift]
        if times != sorted(times):
            raise ValueError("drift: expected entries in the order of at_s")
        if self.returns_after_s is not None and self.fails_at_s is None:
            raise ValueError("returns_after_s: expected fails_at_s with it")
        return self


class Shards(LinkDescription):
    """The parameter server; ``bandwidth_mbit`` is that of each shard's link, which all workers share.

    Attributes:
        count: Number of shards.
        apply_ms: Milliseconds that a push keeps a shard busy; pushes to a shard wait for each other. None: zero, or
            the measured time if workers have a ``speed``.
    """

    count: int = Field(1, ge=1, le=MAX_SHARDS)
    apply_ms: NonNegative | None = None

    @property
    def apply_s(self) -> float:
        """Seconds that a push keeps a shard busy."""
        return (self.apply_ms or 0.0) / 1000


class ClusterDescription(_ClusterTable):
    """A whole cluster.

    Attributes:
        seed: Seed of the step times.
        workers: Descriptions of the workers, in the order of their numbers.
        links: Shared links by name.
        shards: The parameter server.
    """

    seed: int = Field(0, ge=0, lt=2**63)
    workers: tuple[Workers, ...] = Field(min_length=1)
    links: dict[str, LinkDescription] = Field(default_factory=dict)
    shards: Shards = Shards()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for workers in self.workers:
            if workers.link is not None and workers.link not in self.links:
                known = ", ".join(sorted(self.links)) or "none is described"
                raise ValueError(f"workers: link={workers.link!r}: expected a name under [links]: {known}")
        if self.count > MAX_WORKERS:
            raise ValueError(f"workers: expected at most {MAX_WORKERS} in all")
        return self

    @property
    def count(self) -> int:
        """Total number of workers."""
        return sum(workers.count for workers in self.workers)

    def each(self) -> list[Workers]:
        """Return the description of every worker, indexed by its number."""
        return [workers for workers in self.workers for _ in range(workers.count)]

    def path(self, worker: Workers) -> list[LinkDescription]:
        """Return the links between a worker and the shards: its own, that of the shards, and a shared one, if any."""
        return [worker, self.shards, *([self.links[worker.link]] if worker.link is not None else [])]

    @property
    def is_relative(self) -> bool:
        """Whether a worker has a ``speed``, so that steps have to be measured first."""
        return any(workers.speed is not None for workers in self.workers)

    @property
    def has_links(self) -> bool:
        """Whether transfers take any time."""
        links = [*self.workers, *self.links.values(), self.shards]
        return any(link.bandwidth_mbit is not None or link.latency_ms for link in links)

    def measured(self, step: StepTime, batch_size: int, apply_s: float) -> Self:
        """Return the same cluster with every ``speed`` replaced by step times, scaled from the measured machine.

        Args:
            step: Step time of the machine of speed 1.
            batch_size: Samples of the batch that ``step_ms`` refers to.
            apply_s: Seconds that a push of the whole model keeps a shard busy; used if the description has none.
        """

        def timed(workers: Workers) -> Workers:
            if workers.speed is None:
                return workers
            step_ms, overhead_ms = (1000 * s / workers.speed for s in (step.seconds(batch_size), step.alpha_s))
            return workers.model_copy(update={"step_ms": step_ms, "overhead_ms": overhead_ms, "speed": None})

        shards = self.shards
        if shards.apply_ms is None:
            shards = shards.model_copy(update={"apply_ms": 1000 * apply_s / shards.count})
        return self.model_copy(update={"workers": tuple(map(timed, self.workers)), "shards": shards})


def parse_cluster(given: Any, where: str = "cluster") -> ClusterDescription:
    """Return the description in the tables of a TOML file.

    Raises:
        UsageError: an unknown name, a missing or impossible value; the message names the place.
    """
    try:
        return ClusterDescription.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"{where}: {'; '.join(_explained(item) for item in error.errors())}") from None


def _explained(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"])
    text = item["msg"].removeprefix("Value error, ")
    received = item.get("input")
    shown = "" if isinstance(received, dict | list | tuple) else f" Received: {received!r}."
    return f"{place}: {text}.{shown}" if place else f"{text}.{shown}"


def read_cluster(path: Path) -> ClusterDescription:
    """Read the description in a TOML file; see docs/simulate.md.

    Raises:
        UsageError: the file cannot be read, is no TOML, or describes no cluster.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: expected TOML. Received: {error}.") from None
    return parse_cluster(tables, str(path))
