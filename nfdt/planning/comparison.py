"""Forecasts of presets beside one machine: how many times faster, and the part of the cluster that limits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.planning.cost_model import Cluster
from nfdt.planning.forecast import Forecast, forecast
from nfdt.schedulers.batch_policies import find_batch_policy
from nfdt.schedulers.task_policies import make_task_policy
from nfdt.schedulers.throughput import StepTime

PLAIN = "plain Keras"
ALONE = "the fastest worker alone"
TOO_HIGH = 0.10  # greatest excess of published forecasts over measured speeds: docs/benchmarks.md, "forecast"
TOO_HIGH_TOGETHER = 0.26  # the same where workers wait for each other
LEAST_SHARE = 0.1  # a part that costs less is not worth a change: then it is the computation


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
        return _PARTS[self.part][1] if self.part in _PARTS else "more or faster workers help"

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
    share, part = max(
        (
            (1 - forecast(algorithm, without(cluster), samples).epoch_s / whole_s, part)
            for part, (without, _) in _PARTS.items()
        ),
        key=lambda found: found[0],
    )
    return Bottleneck(part, share) if share >= LEAST_SHARE else Bottleneck("compute", 1 - max(0.0, share))


def _without_links(cluster: Cluster) -> Cluster:
    return cluster.map_workers(lambda w: replace(w, exchange_s=w.exchange_s - w.travel_s, travel_s=0.0), links=())


def _without_latency(cluster: Cluster) -> Cluster:
    return cluster.map_workers(lambda w: replace(w, exchange_s=min(w.exchange_s, w.travel_s), ask_s=0.0))


def _without_shard(cluster: Cluster) -> Cluster:
    applied_s = cluster.shard_step_s
    return cluster.map_workers(
        lambda w: replace(w, exchange_s=max(w.travel_s, w.exchange_s - applied_s)), shard_step_s=0.0
    )


def _equal_workers(cluster: Cluster) -> Cluster:
    """Return a cluster with the same speed in all, of equal workers without jitter."""
    batch = cluster.local_batch
    rate = sum(1 / w.step.seconds(batch) for w in cluster.workers) / len(cluster.workers)
    step = StepTime(0.0, 1 / rate / batch)
    return cluster.map_workers(lambda w: replace(w, step=step, jitter=0.0))


# Parts that can limit a preset: the cluster without each of them, and the change that would help.
_PARTS: dict[str, tuple[Callable[[Cluster], Cluster], str]] = {
    "links": (_without_links, "exchange rarely (local-ddc), send fewer bytes (codec='int8'), or hide them (overlap=1)"),
    "latency": (_without_latency, "hide it (overlap=1), or take larger batches"),
    "shard": (_without_shard, "more shards help (shards=2)"),
    "allreduce": (
        partial(replace, allreduce_s=0.0),
        "send fewer bytes (codec='fp16'), or take an algorithm without a barrier (ddc-asgd)",
    ),
    "slowest worker": (_equal_workers, "take an algorithm without a barrier (ddc-asgd, auto), or batch='dbs'"),
    "ends of epochs": (
        partial(replace, epoch_end_s=0.0),
        "longer epochs help (more samples, or a greater steps_per_epoch)",
    ),
}


@dataclass(frozen=True)
class OneMachine:
    """Training without a cluster, to which presets are compared.

    Attributes:
        name: :data:`PLAIN` where Keras' own steps are measured, else :data:`ALONE`.
        samples_per_s: Samples per second.
        epoch_s: Seconds of an epoch.
        sum_of_speeds: Samples per second of all workers, if each trained as this machine does, by its own speed.
    """

    name: str
    samples_per_s: float
    epoch_s: float
    sum_of_speeds: float

    @property
    def limit(self) -> float:
        """Greatest speed-up."""
        return self.sum_of_speeds / self.samples_per_s


@dataclass(frozen=True)
class PlannedRun:
    """Forecast of a preset, compared with one machine.

    Attributes:
        forecast: The forecast, at most at the sum of the workers' speeds.
        speed_up: Seconds of one machine's epoch over those of the preset.
        low: Least speed-up by the spread of what was measured and the error of published forecasts.
        high: Greatest speed-up by that spread, at most the sum of the workers' speeds.
        bottleneck: Part that limits it.
    """

    forecast: Forecast
    speed_up: float
    low: float
    high: float
    bottleneck: Bottleneck

    @property
    def is_faster(self) -> bool:
        """Whether the forecast is faster than one machine."""
        return self.speed_up > 1


def one_machine(
    cluster: Cluster, samples: int, plain_s: float | None = None, step_s: float | None = None
) -> OneMachine:
    """Return the training of one machine.

    Args:
        cluster: The workers.
        samples: Samples of an epoch.
        plain_s: Measured seconds of a step of Keras' ``fit`` on a batch; None: the fastest worker, without exchanging.
        step_s: Seconds of a worker's computation on the machine that ``plain_s`` was measured on; None: as the fastest.
    """
    steps_s = [worker.step.seconds(cluster.local_batch) for worker in cluster.workers]
    here_s = step_s or min(steps_s)
    rate = cluster.local_batch / (plain_s or min(steps_s))
    speeds = [rate * here_s / each_s for each_s in steps_s]
    return OneMachine(PLAIN if plain_s else ALONE, rate, samples / rate, sum(speeds))


def compare(
    algorithms: Sequence[AlgorithmSpec],
    cluster: Cluster,
    samples: int,
    alone: OneMachine,
    spread: tuple[float, float] = (1.0, 1.0),
) -> list[PlannedRun]:
    """Return the forecasts of presets on a cluster, in order, compared with one machine.

    Args:
        algorithms: The presets.
        cluster: The workers.
        samples: Samples of an epoch.
        alone: One machine.
        spread: Range of measured speed-ups over their median, from at most 1 to at least 1.
    """
    runs = []
    for algorithm in algorithms:
        found = forecast(algorithm, cluster, samples)
        epoch_s = max(found.epoch_s, samples / alone.sum_of_speeds)
        found = replace(found, epoch_s=epoch_s, samples_per_s=samples / epoch_s)
        speed_up = min(alone.limit, alone.epoch_s / epoch_s)
        together = algorithm.consistency_facts.synchronous or not algorithm.topology_facts.flat
        error = (TOO_HIGH_TOGETHER if together else TOO_HIGH) if len(cluster.workers) > 1 else 0.0
        low, high = speed_up * spread[0] / (1 + error), max(speed_up, min(alone.limit, speed_up * spread[1]))
        runs.append(PlannedRun(found, speed_up, low, high, find_bottleneck(algorithm, cluster, samples)))
    return runs


def suits(algorithm: AlgorithmSpec, workers: int) -> bool:
    """Whether a preset suits so many workers; one worker has no others to wait for or to share with."""
    alone = algorithm.consistency_facts.independent and algorithm.topology_facts.flat
    shares = find_batch_policy(algorithm.batch).facts.follows_speed or make_task_policy(algorithm.tasks).ends_together
    return workers > 1 or (alone and not shares)
