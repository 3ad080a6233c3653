"""Views of a cluster: with the encoded bytes of a preset, and as its own workers measure it."""

from __future__ import annotations

from dataclasses import replace

from nfdt.codecs import WIDTHS, make_codec
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.planning.cost_model import Cluster, PlannedPreset, WorkerCost, push_rates

MANY = 2**20  # number of elements; the saving of a codec hardly depends on it
ERRORS = {"identity": 0.0, "bf16": 0.0, "int8": 0.0001, "int4": 0.0225}  # relative squares on normal numbers


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

    def cost(name: str) -> float:
        compute_s = worker.step.seconds(batch)
        exchange_s = worker.exchange_s + worker.travel_s * (load * _size(name) - 1)
        seconds = max(compute_s, exchange_s) if algorithm.overlap else compute_s + exchange_s
        return seconds * (1 + ERRORS[name]) ** 2

    affordable = [codec.name for codec in WIDTHS if ERRORS[codec.name] <= algorithm.error_budget]
    return _size(min(affordable, key=cost))


def _size(codec: str, top_k: float = 0.0) -> float:
    return make_codec(codec, top_k=top_k).encoded_bytes(MANY) / (4 * MANY)
