"""Forecasts of presets beside one machine: how many times faster, and what limits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.planning.bottleneck import Bottleneck, find_bottleneck
from nfdt.planning.cost_model import Cluster
from nfdt.planning.forecast import Forecast, forecast

PLAIN = "plain Keras"
ALONE = "the fastest worker alone"


@dataclass(frozen=True)
class OneMachine:
    """Training without a cluster, to which presets are compared.

    Attributes:
        name: :data:`PLAIN` where Keras' own steps are measured, else :data:`ALONE`.
        samples_per_s: Samples per second.
        epoch_s: Seconds of an epoch.
    """

    name: str
    samples_per_s: float
    epoch_s: float


@dataclass(frozen=True)
class PlannedRun:
    """Forecast of a preset, compared with one machine.

    Attributes:
        forecast: The forecast.
        speed_up: Seconds of one machine's epoch over those of the preset.
        bottleneck: Part that limits it.
    """

    forecast: Forecast
    speed_up: float
    bottleneck: Bottleneck


def one_machine(cluster: Cluster, samples: int, plain_s: float | None = None) -> OneMachine:
    """Return the training of one machine.

    Args:
        cluster: The workers.
        samples: Samples of an epoch.
        plain_s: Measured seconds of a step of Keras' ``fit`` on a batch; None: the fastest worker, without exchanging.
    """
    fastest_s = min(worker.step.seconds(cluster.local_batch) for worker in cluster.workers)
    rate = cluster.local_batch / (plain_s or fastest_s)
    return OneMachine(PLAIN if plain_s else ALONE, rate, samples / rate)


def compare(algorithms: Sequence[AlgorithmSpec], cluster: Cluster, samples: int, alone: OneMachine) -> list[PlannedRun]:
    """Return the forecasts of presets on a cluster, in order, compared with one machine."""
    found = [forecast(algorithm, cluster, samples) for algorithm in algorithms]
    return [
        PlannedRun(each, alone.epoch_s / each.epoch_s, find_bottleneck(algorithm, cluster, samples))
        for each, algorithm in zip(found, algorithms, strict=True)
    ]
