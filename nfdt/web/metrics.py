"""Numbers of a job server for Prometheus, in its conventions: base units, ``_total`` for counters, labels for parts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from nfdt.core.jobs.job_record import ACTIVE, TERMINAL
from nfdt.core.jobs.rights import Holder
from nfdt.core.jobs.runner import JobMeasures, JobRunner
from nfdt.core.jobs.store import JobStore

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_COUNTERS = {
    "nfdt_samples": ("samples", "Samples of the gradients that a worker has computed."),
    "nfdt_steps": ("steps", "Gradients that a worker has computed."),
    "nfdt_compute_seconds": ("compute_s", "Time that a worker has spent computing gradients."),
    "nfdt_exchange_seconds": ("exchange_s", "Time that a worker has waited for shards."),
    "nfdt_wait_seconds": ("wait_s", "Time that a worker has waited for instructions."),
    "nfdt_sent_bytes": ("bytes_sent", "Bytes that a worker has sent to shards."),
    "nfdt_received_bytes": ("bytes_received", "Bytes that a worker has received from shards."),
    "nfdt_refused_gradients": ("dropped", "Gradients of a worker that shards refused, as they were not finite."),
}


def render_metrics(store: JobStore, runner: JobRunner, holder: Holder) -> tuple[bytes, str]:
    """Return the metrics of the jobs that the holder of a token may see, and their media type."""
    registry = CollectorRegistry()  # a new one for each request, because each holder sees other jobs
    registry.register(_ServerCollector(store, runner, holder))
    ProcessCollector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _ServerCollector(Collector):
    """Collector of the numbers of jobs and slots; workers and shards of jobs that run now."""

    def __init__(self, store: JobStore, runner: JobRunner, holder: Holder) -> None:
        self._store, self._runner, self._holder = store, runner, holder

    def describe(self) -> list[Metric]:
        """Return nothing: registration must not read the store."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all numbers."""
        active = [record for record in self._store.jobs(ACTIVE) if self._holder.sees(record.owner)]
        yield self._jobs()
        yield self._slots()
        wanted = GaugeMetricFamily("nfdt_workers_wanted", "Workers of the jobs that run, or wait for slots only.")
        wanted.add_metric([], self._runner.workers_wanted())
        yield wanted
        workers = {record.job_id: json.loads(record.workers_json or "{}") for record in active}
        for name, (key, text) in _COUNTERS.items():
            yield _worker_counter(name, key, text, workers)
        yield _staleness(workers)
        measures = {job_id: found for job_id, found in self._runner.measures().items() if job_id in workers}
        waiting = GaugeMetricFamily("nfdt_waiting_tasks", "Tasks of the epoch that no worker has yet.", labels=["job"])
        for job_id, found in measures.items():
            waiting.add_metric([job_id], found.waiting_tasks)
        yield waiting
        yield _push_seconds(measures)

    def _jobs(self) -> Metric:
        counts = self._store.count_states()
        family = GaugeMetricFamily("nfdt_jobs", "Jobs of this server.", labels=["state"])
        for state in (*ACTIVE, *TERMINAL):
            family.add_metric([state], counts.get(state, 0))
        return family

    def _slots(self) -> Metric:
        counts = Counter((slot.role, "busy" if slot.job_id else "free") for slot in self._runner.slots())
        family = GaugeMetricFamily("nfdt_slots", "Registered slots.", labels=["role", "state"])
        for role in ("worker", "shard"):
            for state in ("free", "busy"):
                family.add_metric([role, state], counts[role, state])
        return family


_JobWorkers = Mapping[str, Mapping[str, Mapping[str, Any]]]


def _worker_counter(name: str, key: str, text: str, jobs: _JobWorkers) -> Metric:
    family = CounterMetricFamily(name, text, labels=["job", "worker"])
    for job_id, workers in jobs.items():
        for worker, statistics in workers.items():
            family.add_metric([job_id, worker], float(statistics.get(key) or 0))
    return family


def _staleness(jobs: _JobWorkers) -> Metric:
    family = HistogramMetricFamily("nfdt_staleness_updates", "Updates that a gradient has missed.", labels=["job"])
    for job_id, workers in jobs.items():
        counts: Counter[int] = Counter()
        for statistics in workers.values():
            counts.update({int(tau): int(count) for tau, count in (statistics.get("staleness") or {}).items()})
        total = sum(counts.values())
        below = [(float(bound), sum(n for tau, n in counts.items() if tau <= bound)) for bound in STALENESS_BOUNDS]
        buckets = [(str(bound), float(count)) for bound, count in below] + [("+Inf", float(total))]
        family.add_metric([job_id], buckets, sum_value=float(sum(tau * count for tau, count in counts.items())))
    return family


def _push_seconds(jobs: Mapping[str, JobMeasures]) -> Metric:
    family = HistogramMetricFamily(
        "nfdt_push_seconds", "Time from a push's arrival at a shard to its end there.", labels=["job", "shard"]
    )
    for job_id, measures in jobs.items():
        for index, shard in enumerate(measures.shards):
            if latency := shard.get("latency_s"):
                buckets, total = [], 0
                for bound, count in zip((*latency["bounds_s"], None), latency["counts"], strict=True):
                    total += count
                    buckets.append(("+Inf" if bound is None else str(bound), float(total)))
                family.add_metric([job_id, str(index)], buckets, sum_value=float(latency["sum_s"]))
    return family
