"""Predicted speed and staleness of presets on measured workers, and the choice of the preset with the most progress.

A step takes the seconds of its :class:`~nfdt.schedulers.StepTime`; its push and reply take another ``exchange_s``
unless they are hidden. We define the equations; see docs/algorithms/auto.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from nfdt.core.specs.presets import CONSISTENCY_FACTS
from nfdt.schedulers.batch_policies import find_batch_policy
from nfdt.schedulers.group_shares import share_out
from nfdt.schedulers.grouping import Groups
from nfdt.schedulers.ring_network import RingNetwork
from nfdt.schedulers.throughput import StepTime, lease_size

ENDLESS = 10**9  # number of tasks in an epoch whose end is far
BETTER = 1.1  # ratio of predicted progress from which a running job changes its preset
STALENESS_SCALE = 16.0  # delay that doubles the samples which an update rule with compensation needs


@dataclass(frozen=True)
class WorkerCost:
    """Measured costs of a worker.

    Attributes:
        step: Step time of the gradient alone.
        exchange_s: Seconds of a push with its reply, without waiting for the pushes of others.
        jitter: Standard deviation of its steps as a fraction of them; a barrier waits for the slowest.
        travel_s: Part of ``exchange_s`` that is proportional to the bytes.
        ask_s: Seconds to request work, once per lease.
    """

    name: str
    step: StepTime
    exchange_s: float = 0.0
    jitter: float = 0.0
    travel_s: float = 0.0
    ask_s: float = 0.0


@dataclass(frozen=True)
class SharedLink:
    """A link that several workers share; it carries one message at a time in each direction.

    Attributes:
        busy_s: Seconds for which a push, or its reply, occupies it.
        workers: Indices of the workers that share it.
    """

    busy_s: float
    workers: frozenset[int]


@dataclass(frozen=True)
class Cluster:
    """Properties of a cluster that determine its speed.

    Attributes:
        workers: Workers of the cluster, at least one.
        local_batch: Samples of one worker's reference batch.
        shard_step_s: Seconds that the busiest shard takes per push; pushes to one shard wait for each other.
        allreduce_s: Seconds to average a gradient among all workers; also within a group that spans machines.
        links: Shared links.
        network: Machines of the workers by index, and the cost of rings on one of them.
        epoch_end_s: Seconds of every epoch in which no step is made.
    """

    workers: tuple[WorkerCost, ...]
    local_batch: int
    shard_step_s: float = 0.0
    allreduce_s: float = 0.0
    links: tuple[SharedLink, ...] = ()
    network: RingNetwork = RingNetwork()
    epoch_end_s: float = 0.0

    def map_workers(self, change: Callable[[WorkerCost], WorkerCost], **others: Any) -> Cluster:
        """Return the cluster with changed workers, and with other values of other attributes."""
        return replace(self, workers=tuple(map(change, self.workers)), **others)

    def ring_s(self, members: Sequence[int]) -> float:
        """Return the seconds to average a gradient within a group; on one machine of several it is a local ring's."""
        if len(members) < 2:
            return 0.0
        near = self.network.several and not self.network.spans(members)
        return min(self.allreduce_s, self.network.allreduce_s(members)) if near else self.allreduce_s


@dataclass(frozen=True)
class PlannedPreset:
    """A choice on the axes that the planner decides.

    Attributes:
        groups: Members of each group by index; empty: flat.
    """

    consistency: str
    batch: str
    overlap: int = 0
    groups: Groups = ()

    @property
    def synchronous(self) -> bool:
        """Whether workers train in rounds."""
        return CONSISTENCY_FACTS[self.consistency].synchronous

    @property
    def follows_speed(self) -> bool:
        """Whether local batches follow the speed of their workers."""
        return find_batch_policy(self.batch).facts.follows_speed

    @property
    def topology(self) -> str:
        """Name on the axis."""
        return "groups" if self.groups else "flat"


@dataclass(frozen=True)
class Prediction:
    """Predicted speed and staleness of a preset.

    Attributes:
        samples_per_s: Samples per second of all workers together.
        staleness: Mean updates that a gradient misses.
        most_staleness: Mean updates that a gradient of the slowest worker misses.
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
    """Sender of pushes: a worker, or a group through its first member."""

    worker: int
    samples: float
    period_s: float
    jitter: float = 0.0


def slowest(pushers: Sequence[tuple[float, float]]) -> float:
    """Return the expected seconds until all of these (mean seconds, jitter) have finished.

    It uses Blom's approximation of the greatest of n normal numbers, for the n that are about as slow as the slowest.
    """
    longest = max(seconds for seconds, _ in pushers)
    alike = [jitter for seconds, jitter in pushers if seconds > longest * (1 - 2 * jitter) or seconds == longest]
    count, jitter = len(alike), max(alike)
    return longest * (1 + jitter * max(0.0, NormalDist().inv_cdf((count - 0.375) / (count + 0.25))))


def predict(preset: PlannedPreset, cluster: Cluster) -> Prediction:
    """Return the throughput and the staleness of a preset; see :class:`Prediction`."""
    pushers = _groups(preset, cluster) if preset.groups else _workers(preset, cluster)
    if preset.synchronous:
        total = sum(p.samples for p in pushers)
        return Prediction(total / _round_s(pushers, cluster), 0.0, 0.0, total / cluster.local_batch)
    rates = _rates(pushers, cluster)
    samples_per_s = sum(p.samples * rate for p, rate in zip(pushers, rates, strict=True))
    # Each push that may overlap makes the weights of a gradient one step older, while the others continue.
    steps = 1 + preset.overlap
    mean = steps * len(pushers) - 1
    most = steps * (sum(rates) - min(rates)) / min(rates) + preset.overlap
    merged = sum(p.samples**2 * rate for p, rate in zip(pushers, rates, strict=True)) / samples_per_s
    return Prediction(samples_per_s, float(mean), max(float(mean), most), merged / cluster.local_batch)


def push_rates(preset: PlannedPreset, cluster: Cluster) -> list[tuple[int, float, float]]:
    """Return the index, the seconds per step alone and the steps per second in the cluster of each pushing worker."""
    pushers = _workers(preset, cluster)
    return [(p.worker, p.period_s, rate) for p, rate in zip(pushers, _rates(pushers, cluster), strict=True)]


def flat_presets(batch: str, overlap: int) -> list[PlannedPreset]:
    """Return the candidate presets of flat workers, simplest first.

    A barrier over all workers is not a candidate: at the learning rate of one machine it makes one update while the
    others make one per worker. In this model no staleness below some hundred workers outweighs that.

    Args:
        batch: Batch policy that the job requests.
        overlap: Maximum overlap.
    """
    return [PlannedPreset("free", batch, depth) for depth in range(min(overlap, 1) + 1)]


def _rates(pushers: Sequence[_Pusher], cluster: Cluster) -> list[float]:
    """Return the pushes per second of each; an overloaded link or shard slows all its pushers by the same factor."""
    rates = {p.worker: 1 / p.period_s for p in pushers}
    shard = SharedLink(cluster.shard_step_s, frozenset(rates))
    for shared in (*cluster.links, shard):
        here = shared.workers & rates.keys()
        slowed = max(1.0, shared.busy_s * sum(rates[worker] for worker in here))
        rates.update({worker: rates[worker] / slowed for worker in here})
    return list(rates.values())


def _round_s(pushers: Sequence[_Pusher], cluster: Cluster) -> float:
    """Return the seconds of a round: simultaneous pushes wait for each other, and so do simultaneous replies."""
    shard = SharedLink(cluster.shard_step_s, frozenset(p.worker for p in pushers))
    queue_s = 0.0
    for shared in (*cluster.links, shard):
        periods = sorted(p.period_s for p in pushers if p.worker in shared.workers)
        free_s = 0.0
        for period_s in periods:
            free_s = max(period_s, free_s + shared.busy_s)
        # A worker with a later reply begins later, so that its push no longer meets the others: only one wait counts.
        replies_s = 0.0 if shared is shard else shared.busy_s * (len(periods) - 1)
        queue_s = max(queue_s, free_s - periods[-1], replies_s)
    asks_s = 2 * max(cluster.workers[p.worker].ask_s for p in pushers)  # the reply to the push, and a pull
    return slowest([(p.period_s, p.jitter) for p in pushers]) + queue_s + asks_s


def _workers(preset: PlannedPreset, cluster: Cluster) -> list[_Pusher]:
    asks = not preset.synchronous
    sizes = find_batch_policy(preset.batch).predicted(cluster.local_batch, [w.step for w in cluster.workers])
    return [
        _Pusher(index, size, _period(worker.step.seconds(size), worker, preset.overlap, asks=asks), worker.jitter)
        for index, (worker, size) in enumerate(zip(cluster.workers, sizes, strict=True))
        if size > 0
    ]


def _groups(preset: PlannedPreset, cluster: Cluster) -> list[_Pusher]:
    times = {index: worker.step for index, worker in enumerate(cluster.workers)}
    shares = share_out(preset.groups, times, cluster.local_batch, proportional=preset.follows_speed)
    pushers = []
    for share in shares:
        members = [cluster.workers[i] for i in share.members]
        steps = [(m.step.seconds(rows), m.jitter) for m, rows in zip(members, share.rows, strict=True)]
        exchange_s = cluster.ring_s(share.members) + max(m.exchange_s + m.ask_s for m in members)
        pushers.append(_Pusher(share.members[0], float(share.batch), slowest(steps) + exchange_s))
    return pushers


def _period(step_s: float, worker: WorkerCost, overlap: int, *, asks: bool) -> float:
    whole_s = step_s + worker.exchange_s
    if asks and worker.ask_s:
        step_s += worker.ask_s / lease_size(ENDLESS, 1, whole_s)
    # Each of 1 + overlap steps in flight passes through computation and exchange; no link carries two at once.
    return max(step_s, (step_s + worker.exchange_s) / (1 + overlap), worker.travel_s / 2)


@dataclass(frozen=True)
class PlanChoice:
    """A preset, its prediction, and the reason for the choice."""

    preset: PlannedPreset
    prediction: Prediction
    reason: str


def choose(cluster: Cluster, presets: Sequence[PlannedPreset], *, current: PlannedPreset | None = None) -> PlanChoice:
    """Return the best preset for measured workers; of equally good ones the first.

    Args:
        cluster: The workers.
        presets: Presets to choose from, at least one.
        current: Current preset, kept unless another one is predicted to make ``BETTER`` times its progress.
    """
    presets = presets if current is None or current in presets else [current, *presets]
    predictions = {preset: predict(preset, cluster) for preset in presets}
    best = max(presets, key=lambda preset: predictions[preset].progress_per_s)
    if current is not None and predictions[best].progress_per_s < BETTER * predictions[current].progress_per_s:
        best = current
    return PlanChoice(best, predictions[best], _sentence(cluster, best, predictions[best]))


def _sentence(cluster: Cluster, preset: PlannedPreset, chosen: Prediction) -> str:
    steps = [w.step.seconds(cluster.local_batch) for w in cluster.workers]
    barrier = predict(PlannedPreset("bsp", "fixed"), cluster)
    return (
        f"{_named(preset)}: {len(steps)} workers take {_range_ms(steps)} per batch of {cluster.local_batch} and "
        f"{_range_ms([w.exchange_s for w in cluster.workers])} to exchange; expected {chosen.samples_per_s:,.0f} "
        f"samples/s, {chosen.samples_per_s / barrier.samples_per_s:.1f} times a barrier's, "
        f"at a mean staleness of {chosen.staleness:.1f}."
    )


def _named(preset: PlannedPreset) -> str:
    if preset.groups:
        return f"groups {' | '.join(','.join(map(str, members)) for members in preset.groups)}"
    batches = find_batch_policy(preset.batch).adjective
    return f"free workers with {batches} batches, overlap {preset.overlap}"


def _range_ms(seconds: Sequence[float]) -> str:
    low, high = min(seconds) * 1000, max(seconds) * 1000
    return f"{low:.3g} ms" if high < 1.05 * low or high == 0 else f"{low:.3g} to {high:.3g} ms"
