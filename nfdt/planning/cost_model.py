"""Predicted speed and staleness of a row of the preset table on workers that were measured.

A step takes the seconds of its :class:`~nfdt.schedulers.StepTime`, its push and reply ``exchange_s`` more unless they
are hidden. The equations are ours; see docs/algorithms/auto.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from nfdt.schedulers import StepTime, water_fill

Consistency = Literal["bsp", "free"]
Batch = Literal["fixed", "dbs"]
Groups = tuple[tuple[int, ...], ...]

STALENESS_SCALE = 16.0  # so much delay doubles the samples that an update rule with compensation needs


@dataclass(frozen=True)
class WorkerCost:
    """What a worker was measured to take.

    Attributes:
        step: Of the gradient alone.
        exchange_s: Seconds of a push with its reply, without waiting for the pushes of others.
        jitter: By what share its steps vary (their standard deviation); who waits for several waits for the slowest.
    """

    name: str
    step: StepTime
    exchange_s: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """What decides over speed besides the row.

    Attributes:
        workers: At least one.
        local_batch: Samples of one worker's reference batch.
        shard_step_s: Seconds that the busiest shard takes per push; pushes to one shard wait for each other.
        allreduce_s: Seconds to average a gradient inside a group.
    """

    workers: tuple[WorkerCost, ...]
    local_batch: int
    shard_step_s: float = 0.0
    allreduce_s: float = 0.0


@dataclass(frozen=True)
class Row:
    """A choice on the axes that the planner decides.

    Attributes:
        groups: Members of each group by index; empty: flat.
    """

    consistency: Consistency
    batch: Batch
    overlap: int = 0
    groups: Groups = ()

    @property
    def topology(self) -> str:
        """As on the axis."""
        return "groups" if self.groups else "flat"


@dataclass(frozen=True)
class Prediction:
    """What a row is expected to do.

    Attributes:
        samples_per_s: Of all workers together.
        staleness: Mean updates that a gradient misses.
        most_staleness: Of the slowest worker.
        batches_per_update: Reference batches that an update averages, as a sample sees it.
    """

    samples_per_s: float
    staleness: float
    most_staleness: float
    batches_per_update: float

    @property
    def samples_factor(self) -> float:
        """Samples needed for the same loss, relative to one machine; above 1.

        Two effects, both approximations: an update from c times the samples at the same learning rate is worth
        sqrt(c) updates, and a delay of ``STALENESS_SCALE`` updates doubles the need.
        """
        delay = (self.staleness + self.most_staleness) / 2
        return math.sqrt(max(1.0, self.batches_per_update)) * (1 + delay / STALENESS_SCALE)

    @property
    def progress_per_s(self) -> float:
        """Samples per second, each worth what it would be worth on one machine."""
        return self.samples_per_s / self.samples_factor


@dataclass(frozen=True)
class _Pusher:
    """Whoever pushes: a worker, or a group through its leader."""

    samples: float
    period_s: float
    jitter: float = 0.0


def slowest(pushers: Sequence[tuple[float, float]]) -> float:
    """Expected seconds until all of these (mean seconds, jitter) are done.

    Blom's approximation of the greatest of n normal numbers, for the n that are about as slow as the slowest.
    """
    longest = max(seconds for seconds, _ in pushers)
    alike = [jitter for seconds, jitter in pushers if seconds > longest * (1 - 2 * jitter) or seconds == longest]
    count, jitter = len(alike), max(alike)
    return longest * (1 + jitter * max(0.0, NormalDist().inv_cdf((count - 0.375) / (count + 0.25))))


def predict(row: Row, cluster: Cluster) -> Prediction:
    """Throughput and staleness of a row; see :class:`Prediction`."""
    pushers = _groups(row, cluster) if row.groups else _workers(row, cluster)
    if row.consistency == "bsp":
        step_s = max(slowest([(p.period_s, p.jitter) for p in pushers]), cluster.shard_step_s * len(pushers))
        total = sum(p.samples for p in pushers)
        return Prediction(total / step_s, 0.0, 0.0, total / cluster.local_batch)
    rates = [1 / p.period_s for p in pushers]
    # Pushes that arrive faster than the shard applies them wait: everybody is slowed down alike.
    slowed = max(1.0, sum(rates) * cluster.shard_step_s)
    samples_per_s = sum(p.samples * rate for p, rate in zip(pushers, rates, strict=True)) / slowed
    # A gradient is computed on an answer one step older for each push that may overlap: others go on meanwhile.
    steps = 1 + row.overlap
    mean = steps * len(pushers) - 1
    most = steps * (sum(rates) - min(rates)) / min(rates) + row.overlap
    merged = sum(p.samples**2 * rate for p, rate in zip(pushers, rates, strict=True)) / slowed / samples_per_s
    return Prediction(samples_per_s, float(mean), max(float(mean), most), merged / cluster.local_batch)


def flat_rows(batch: Batch, overlap: int) -> list[Row]:
    """The rows of flat workers to choose from, simplest first.

    A barrier over all workers is not among them: at the learning rate of one machine it makes one update where the
    others make one per worker, which no staleness below some hundred workers outweighs in this model.

    Args:
        batch: As the job asks for it.
        overlap: The most there may be.
    """
    return [Row("free", batch, depth) for depth in range(min(overlap, 1) + 1)]


def _workers(row: Row, cluster: Cluster) -> list[_Pusher]:
    batch = float(cluster.local_batch)
    if row.batch == "fixed":
        sizes = [batch] * len(cluster.workers)
    else:
        _, sizes = water_fill(batch * len(cluster.workers), [w.step for w in cluster.workers])
    pairs = [(w, size) for w, size in zip(cluster.workers, sizes, strict=True) if size > 0]
    return [_Pusher(size, _period(w.step.seconds(size), w.exchange_s, row.overlap), w.jitter) for w, size in pairs]


def _groups(row: Row, cluster: Cluster) -> list[_Pusher]:
    pushers = []
    for indices in row.groups:
        members = [cluster.workers[i] for i in indices]
        samples = float(cluster.local_batch * len(members))
        time_s, _ = water_fill(samples, [m.step for m in members])
        time_s = slowest([(time_s, m.jitter) for m in members])
        inside = cluster.allreduce_s if len(members) > 1 else 0.0
        pushers.append(_Pusher(samples, time_s + inside + max(m.exchange_s for m in members)))
    return pushers


def _period(step_s: float, exchange_s: float, overlap: int) -> float:
    return max(step_s, exchange_s) if overlap else step_s + exchange_s
