"""Bottleneck of a preset on a cluster: the part without which an epoch would end soonest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.planning.cost_model import Cluster
from nfdt.planning.forecast import forecast
from nfdt.schedulers import StepTime

LEAST_SHARE = 0.1  # a part that costs less is not worth a change: then it is the computation

_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "compute": "more or faster workers help",
        "links": "send fewer bytes (codec='int8'), hide them (overlap=1), or take larger batches",
        "latency": "hide it (overlap=1), or take larger batches",
        "shard": "more shards help (shards=2)",
        "allreduce": "send fewer bytes (codec='fp16'), or take an algorithm without a barrier (ddc-asgd)",
        "slowest worker": "take an algorithm without a barrier (ddc-asgd, auto), or batch='dbs'",
        "ends of epochs": "longer epochs help (more samples, or a greater steps_per_epoch)",
    }
)


@dataclass(frozen=True)
class Bottleneck:
    """Part of a cluster that limits a preset.

    Attributes:
        part: ``compute``, ``links``, ``latency``, ``shard``, ``allreduce``, ``slowest worker``, or ``ends of epochs``.
        share: Part of an epoch's seconds that would be saved without it; of ``compute`` what no other part takes.
    """

    part: str
    share: float

    @property
    def remedy(self) -> str:
        """Change that would help."""
        return _REMEDIES[self.part]

    def __str__(self) -> str:
        return f"{self.part} ({100 * self.share:.0f} %)"


def find_bottleneck(algorithm: AlgorithmSpec, cluster: Cluster, samples: int) -> Bottleneck:
    """Return the bottleneck of a preset: each part is left out in turn, and the epoch predicted again.

    Args:
        algorithm: The preset.
        cluster: The workers.
        samples: Samples of an epoch.
    """
    whole_s = forecast(algorithm, cluster, samples).epoch_s
    shares = {
        part: 1 - forecast(algorithm, without(cluster), samples).epoch_s / whole_s for part, without in _WITHOUT.items()
    }
    part = max(shares, key=lambda name: shares[name])
    if shares[part] < LEAST_SHARE:
        return Bottleneck("compute", 1 - max(0.0, shares[part]))
    return Bottleneck(part, shares[part])


def _without_links(cluster: Cluster) -> Cluster:
    workers = [replace(w, exchange_s=w.exchange_s - w.travel_s, travel_s=0.0) for w in cluster.workers]
    return replace(cluster, workers=tuple(workers), links=())


def _without_latency(cluster: Cluster) -> Cluster:
    workers = [replace(w, exchange_s=min(w.exchange_s, w.travel_s), ask_s=0.0) for w in cluster.workers]
    return replace(cluster, workers=tuple(workers))


def _without_shard(cluster: Cluster) -> Cluster:
    applied_s = cluster.shard_step_s
    workers = [replace(w, exchange_s=max(w.travel_s, w.exchange_s - applied_s)) for w in cluster.workers]
    return replace(cluster, workers=tuple(workers), shard_step_s=0.0)


def _without_allreduce(cluster: Cluster) -> Cluster:
    return replace(cluster, allreduce_s=0.0)


def _without_ends(cluster: Cluster) -> Cluster:
    return replace(cluster, epoch_end_s=0.0)


def _equal_workers(cluster: Cluster) -> Cluster:
    """Return a cluster with the same speed in all, of equal workers without jitter."""
    batch = cluster.local_batch
    rate = sum(1 / w.step.seconds(batch) for w in cluster.workers) / len(cluster.workers)
    step = StepTime(0.0, 1 / rate / batch)
    return replace(cluster, workers=tuple(replace(w, step=step, jitter=0.0) for w in cluster.workers))


_WITHOUT: Mapping[str, Callable[[Cluster], Cluster]] = MappingProxyType(
    {
        "links": _without_links,
        "latency": _without_latency,
        "shard": _without_shard,
        "allreduce": _without_allreduce,
        "slowest worker": _equal_workers,
        "ends of epochs": _without_ends,
    }
)
