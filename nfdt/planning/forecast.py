"""Forecast of each preset on a cluster, with the bytes that it sends, and a recommendation, as ``auto`` predicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nfdt.codecs import WIDTHS, make_codec
from nfdt.core.specs.algorithm import MOST_LOCAL_STEPS, AlgorithmSpec, explicit_groups, wanted_groups
from nfdt.planning.accuracy import AccuracyLoss, expected_loss, measured_as
from nfdt.planning.cost_model import (
    Cluster,
    PlannedPreset,
    Prediction,
    WorkerCost,
    choose,
    flat_presets,
    predict,
    push_rates,
    slowest,
)
from nfdt.schedulers.grouping import choose as choose_groups
from nfdt.schedulers.grouping import divide
from nfdt.schedulers.local_steps import EXCHANGE_SHARE
from nfdt.schedulers.task_policies import make_task_policy
from nfdt.schedulers.throughput import StepTime

MUCH = 1.5  # points of accuracy
MANY = 2**20  # number of elements; the saving of a codec hardly depends on it
ERRORS = {"identity": 0.0, "bf16": 0.0, "int8": 0.0001, "int4": 0.0225}  # relative squares on normal numbers


@dataclass(frozen=True)
class Forecast:
    """Forecast of one preset on one cluster.

    Attributes:
        algorithm: Name of the preset.
        samples_per_s: Samples per second of all workers, over whole epochs.
        epoch_s: Seconds of an epoch.
        staleness: Mean updates that a gradient misses.
        most_staleness: Mean updates that a gradient of the slowest worker misses.
        samples_factor: Samples needed for the same loss, relative to one machine; None if it is unknown, because the
            preset's update rule does not compensate its delay.
        loss: Loss of accuracy relative to one machine after the same samples, if a similar case was measured.
    """

    algorithm: str
    samples_per_s: float
    epoch_s: float
    staleness: float
    most_staleness: float
    samples_factor: float | None
    loss: AccuracyLoss

    @property
    def progress_per_s(self) -> float:
        """Samples per second, weighted with their worth on one machine; 0 if that is unknown."""
        return self.samples_per_s / self.samples_factor if self.samples_factor else 0.0


def forecast(algorithm: AlgorithmSpec, cluster: Cluster, samples: int) -> Forecast:
    """Return the forecast of a preset.

    Args:
        algorithm: The preset.
        cluster: The workers.
        samples: Samples of an epoch.
    """
    preset = planned_preset(algorithm, cluster)  # an online choice is made before the codecs adapt
    cluster, facts = encoded(cluster, algorithm), algorithm.consistency_facts
    if algorithm.exchange_facts.local:
        cluster = exchanging_rarely(cluster, algorithm)
    if algorithm.topology_facts.allreduce:  # without pushes
        allreduce_s = cluster.allreduce_s
        cluster = cluster.map_workers(
            lambda worker: replace(worker, exchange_s=allreduce_s, ask_s=0.0), shard_step_s=0.0, links=()
        )
    elif facts.bounded or facts.merges:  # workers request every single task
        cluster = cluster.map_workers(lambda w: replace(w, exchange_s=w.exchange_s + w.ask_s, ask_s=0.0))
    prediction = predict(preset, cluster)
    if algorithm.exchange_facts.local:  # hidden exchanges delay no difference: a worker adds to each reply what it did
        delay = predict(replace(preset, overlap=0), cluster)
        prediction = replace(prediction, staleness=delay.staleness, most_staleness=delay.most_staleness)
    if facts.bounded:  # in the long run no worker is faster than the slowest
        prediction = _bounded(prediction, algorithm.staleness_bound, cluster)
    if facts.merges:
        merged = max(1, len(cluster.workers) // algorithm.softsync_n)
        prediction = replace(
            prediction,
            staleness=prediction.staleness / merged,
            most_staleness=prediction.most_staleness / merged,
            batches_per_update=float(merged),
        )
    epoch_s = samples / prediction.samples_per_s + _tail_s(preset, algorithm, cluster)
    if preset.synchronous:  # rounds come whole
        size = cluster.local_batch * len(cluster.workers)
        epoch_s = -(-samples // size) * size / prediction.samples_per_s
    epoch_s += cluster.epoch_end_s
    # The model of the samples that a delay costs holds for update rules with compensation only.
    local = algorithm.exchange_facts.local
    known = (prediction.most_staleness == 0 or algorithm.rule_facts.modelled) and not local
    factor = prediction.samples_factor if known else None
    loss = expected_loss(measured_as(algorithm), (1 + preset.overlap) * len(cluster.workers) - 1)
    staleness = prediction.staleness, prediction.most_staleness
    return Forecast(algorithm.name, samples / epoch_s, epoch_s, *staleness, factor, loss)


def measured_cluster(workers: Mapping[str, Mapping[str, Any]]) -> Cluster | None:
    """Return the cluster that a job has measured; None if it has measured no worker yet.

    Args:
        workers: For each worker ``step_s``, its part ``step_exchange_s``, and ``batch_size``, as in ``history.nfdt``.
            Workers without these, and groups, are left out. An allreduce is assumed to take as long as an exchange.
    """
    measured = {name: entry for name, entry in workers.items() if entry.get("step_s") and entry.get("batch_size")}
    if not measured:
        return None
    costs = []
    for name, entry in measured.items():
        exchange_s = min(float(entry.get("step_exchange_s", 0.0)), 0.95 * float(entry["step_s"]))
        step = StepTime(0.0, (float(entry["step_s"]) - exchange_s) / int(entry["batch_size"]))
        costs.append(WorkerCost(name, step, exchange_s))
    local_batch = round(sum(int(entry["batch_size"]) for entry in measured.values()) / len(measured))
    return Cluster(tuple(costs), local_batch, allreduce_s=max(cost.exchange_s for cost in costs))


def planned_preset(algorithm: AlgorithmSpec, cluster: Cluster) -> PlannedPreset:
    """Return the choice on the axes of the cost model."""
    facts = algorithm.consistency_facts
    if facts.synchronous:  # rounds of local steps are divided by speed
        return PlannedPreset(algorithm.consistency, "dbs" if algorithm.exchange_facts.local else algorithm.batch)
    if algorithm.topology_facts.grouped:
        seconds = [worker.step.seconds(cluster.local_batch) for worker in cluster.workers]
        count = wanted_groups(algorithm.groups)
        network = cluster.network
        found = choose_groups(seconds, network=network) if count is None else divide(seconds, count, network)
        return PlannedPreset("free", "dbs", groups=explicit_groups(algorithm.groups, len(seconds)) or found)
    if algorithm.plan != "nothing":
        presets = flat_presets(algorithm.batch, algorithm.overlap)
        return choose(as_measured(cluster, presets[0].batch), presets, current=presets[0]).preset
    return PlannedPreset("free", algorithm.batch, algorithm.overlap)


def recommend(forecasts: Sequence[Forecast]) -> tuple[Forecast, str]:
    """Return the preset with the most progress per second and the reason as a sentence; of equals the first.

    Args:
        forecasts: Forecasts to compare, at least one.
    """
    best = max(forecasts, key=lambda each: each.progress_per_s)
    if best.samples_factor is None:
        best = max(forecasts, key=lambda each: each.samples_per_s)
        reason = f"{best.algorithm}: the most samples per second ({best.samples_per_s:,.0f}) of these rows"
        return best, f"{reason}; {_accuracy(best.loss)}."
    others = [each for each in forecasts if each.samples_factor and each is not best]
    second = max(others, key=lambda each: each.progress_per_s, default=None)
    reason = (
        f"{best.algorithm}: {best.samples_per_s:,.0f} samples/s at a mean staleness of {best.staleness:.1f}, each "
        f"worth 1/{best.samples_factor:.2f} of one machine's"
    )
    if second is not None:
        times = best.progress_per_s / second.progress_per_s
        reason += f"; that is {times:.2f} times the progress of {second.algorithm}"
    return best, f"{reason}; {_accuracy(best.loss)}."


def _accuracy(loss: AccuracyLoss) -> str:
    """Return the loss in words and, where it is large, what was measured to help: docs/convergence.md."""
    worst = max(loss.low or 0.0, loss.high or 0.0)
    remedy = ", less with a smaller batch_size and a lower learning rate" if worst >= MUCH else ""
    return f"accuracy lost: {loss}{remedy}"


def _bounded(free: Prediction, bound: int, cluster: Cluster) -> Prediction:
    """Return the prediction at the speed of the slowest worker; a bound of s steps leaves 1 / (s + 1) of the jitter.

    A worker that waits for the slowest pulls afterwards and begins with it. Of two workers that begin together, one
    misses the other's update; of two that never wait, each does. In between we use the squares of both step times over
    the slowest one's, which the simulator confirms.
    """
    workers, batch = cluster.workers, cluster.local_batch
    last = max(workers, key=lambda worker: worker.step.seconds(batch) + worker.exchange_s)
    pace = predict(PlannedPreset("free", "fixed"), replace(cluster, workers=(last,) * len(workers)))
    steps_s = [worker.step.seconds(batch) + worker.exchange_s for worker in workers]
    period_s = slowest([(step_s, w.jitter / (bound + 1)) for step_s, w in zip(steps_s, workers, strict=True)])
    busy = [(step_s / max(steps_s)) ** 2 for step_s in steps_s]
    pairs, never_wait = len(busy) * (len(busy) - 1), sum(busy) ** 2 - sum(share**2 for share in busy)
    staleness = free.staleness * (1 + never_wait / max(1, pairs)) / 2
    most = min(free.most_staleness, float((2 * bound + 1) * (len(workers) - 1)))
    rate = pace.samples_per_s * max(steps_s) / period_s
    return replace(free, samples_per_s=rate, staleness=staleness, most_staleness=max(staleness, most))


def _tail_s(preset: PlannedPreset, algorithm: AlgorithmSpec, cluster: Cluster) -> float:
    """Return the seconds lost at the end of an epoch: on average workers wait for half a step of the slowest."""
    if preset.synchronous:
        return 0.0
    longest = max(worker.step.seconds(cluster.local_batch) + worker.exchange_s for worker in cluster.workers)
    if preset.follows_speed or make_task_policy(algorithm.tasks).ends_together:
        mean = sum(w.step.seconds(cluster.local_batch) + w.exchange_s for w in cluster.workers) / len(cluster.workers)
        return mean / 2
    return longest / 2


def encoded(cluster: Cluster, algorithm: AlgorithmSpec) -> Cluster:
    """Return the cluster with the bytes of the preset's codecs; an adaptive codec is the cheapest one of each link.

    Coding itself is assumed to cost nothing, and an adaptive codec to be the same in both directions.
    """
    if not algorithm.codec_facts.encodes and not algorithm.encodes_replies:
        return cluster
    loads = _loads(cluster)
    parts = [_part(w, load, cluster.local_batch, algorithm) for w, load in zip(cluster.workers, loads, strict=True)]
    workers = [
        replace(worker, exchange_s=worker.exchange_s - worker.travel_s * (1 - part), travel_s=worker.travel_s * part)
        for worker, part in zip(cluster.workers, parts, strict=True)
    ]
    links = [
        replace(link, busy_s=link.busy_s * sum(parts[i] for i in link.workers) / len(link.workers))
        for link in cluster.links
    ]
    return replace(cluster, workers=tuple(workers), links=tuple(links))


def exchanging_rarely(cluster: Cluster, algorithm: AlgorithmSpec) -> Cluster:
    """Return the cluster with the costs of exchanges divided among the local steps of each worker."""
    batch = cluster.local_batch
    steps_s = [worker.step.seconds(batch) for worker in cluster.workers]
    if algorithm.local_steps == "auto":
        wanted = [w.exchange_s / EXCHANGE_SHARE / step_s for w, step_s in zip(cluster.workers, steps_s, strict=True)]
        counts = [min(max(1, math.ceil(count)), MOST_LOCAL_STEPS) for count in wanted]
    elif algorithm.consistency_facts.synchronous:
        counts = [algorithm.local_steps] * len(steps_s)
    else:
        counts = [max(1, math.floor(algorithm.local_steps * min(steps_s) / step_s)) for step_s in steps_s]
    workers = [
        replace(w, exchange_s=w.exchange_s / count, travel_s=w.travel_s / count, ask_s=w.ask_s / count)
        for w, count in zip(cluster.workers, counts, strict=True)
    ]
    links = [
        replace(link, busy_s=link.busy_s * sum(1 / counts[i] for i in link.workers) / len(link.workers))
        for link in cluster.links
    ]
    applied_s = cluster.shard_step_s * sum(1 / count for count in counts) / len(counts)
    return replace(cluster, workers=tuple(workers), links=tuple(links), shard_step_s=applied_s)


def as_measured(cluster: Cluster, batch: str) -> Cluster:
    """Return the cluster as free workers without overlap measure it: waiting for others is part of an exchange."""
    waits = {index: 1 / rate - period_s for index, period_s, rate in push_rates(PlannedPreset("free", batch), cluster)}
    workers = [replace(w, exchange_s=w.exchange_s + waits.get(i, 0.0)) for i, w in enumerate(cluster.workers)]
    return replace(cluster, workers=tuple(workers), shard_step_s=0.0, links=())


def _loads(cluster: Cluster) -> list[float]:
    """Return the factor by which shared links slow each worker's bytes."""
    rates = {index: 1 / period_s for index, period_s, _ in push_rates(PlannedPreset("free", "fixed"), cluster)}
    loads = [1.0] * len(cluster.workers)
    for link in cluster.links:
        load = link.busy_s * sum(rates[i] for i in link.workers)
        for i in link.workers:
            loads[i] = max(loads[i], load)
    return loads


def _part(worker: WorkerCost, load: float, batch: int, algorithm: AlgorithmSpec) -> float:
    """Return the share of the bytes of a push with its reply that remains after encoding."""
    if not algorithm.codec_facts.adaptive:
        return (_size(algorithm.codec, algorithm.top_k) + _size(algorithm.codec_of_replies, algorithm.top_k)) / 2

    local = algorithm.exchange_facts.local

    def cost(name: str) -> float:
        compute_s = worker.step.seconds(batch)
        exchange_s = worker.exchange_s + worker.travel_s * (load * _size(name) - 1)
        seconds = max(compute_s, exchange_s) if algorithm.hides_exchanges else compute_s + exchange_s
        return seconds * (1 + ERRORS[name]) ** 2

    affordable = [codec.name for codec in WIDTHS if ERRORS[codec.name] <= algorithm.error_budget]
    return _size(min(affordable[-2:] if local else affordable, key=cost))


def _size(codec: str, top_k: float = 0.0) -> float:
    return make_codec(codec, top_k=top_k).encoded_bytes(MANY) / (4 * MANY)
