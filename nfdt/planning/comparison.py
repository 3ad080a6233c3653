"""Forecasts of presets beside one machine: how many times faster, and what limits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.planning.bottleneck import Bottleneck, find_bottleneck
from nfdt.planning.cost_model import Cluster
from nfdt.planning.forecast import Forecast, forecast
from nfdt.planning.limits import sum_of_speeds
from nfdt.schedulers.batch_policies import find_batch_policy
from nfdt.schedulers.task_policies import make_task_policy

PLAIN = "plain Keras"
ALONE = "the fastest worker alone"
TOO_HIGH = 0.10  # greatest excess of published forecasts over measured speeds: docs/benchmarks.md, "forecast"
TOO_HIGH_TOGETHER = 0.26  # the same where workers wait for each other


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
    return OneMachine(PLAIN if plain_s else ALONE, rate, samples / rate, sum_of_speeds(speeds))


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
    return [_compared(algorithm, cluster, samples, alone, spread) for algorithm in algorithms]


def uses(algorithm: AlgorithmSpec, workers: int) -> bool:
    """Whether so many workers can use what a preset is made of; one worker has none to wait for or to share with."""
    alone = algorithm.consistency_facts.independent and algorithm.topology_facts.flat
    shares = find_batch_policy(algorithm.batch).facts.follows_speed or make_task_policy(algorithm.tasks).ends_together
    return workers > 1 or (alone and not shares)


def _compared(
    algorithm: AlgorithmSpec, cluster: Cluster, samples: int, alone: OneMachine, spread: tuple[float, float]
) -> PlannedRun:
    found = forecast(algorithm, cluster, samples)
    epoch_s = max(found.epoch_s, samples / alone.sum_of_speeds)
    found = replace(found, epoch_s=epoch_s, samples_per_s=samples / epoch_s)
    speed_up = min(alone.limit, alone.epoch_s / epoch_s)
    together = algorithm.consistency_facts.synchronous or not algorithm.topology_facts.flat
    error = (TOO_HIGH_TOGETHER if together else TOO_HIGH) if len(cluster.workers) > 1 else 0.0
    low, high = speed_up * spread[0] / (1 + error), max(speed_up, min(alone.limit, speed_up * spread[1]))
    return PlannedRun(found, speed_up, low, high, find_bottleneck(algorithm, cluster, samples))
