"""Totals of the workers of running jobs, second by second, for charts of the recent past."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nfdt.core.errors import NotStored
from nfdt.core.host.usage import UsageMeter
from nfdt.core.jobs.job_record import ACTIVE
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.work.statistics import split_by_rank

INTERVAL_S = 1.0
LENGTH = 900  # points of a job: a quarter of an hour
KEPT = 50  # jobs; the oldest are forgotten first

# The numbers of a worker in a point, in this order. Those of the first two lines are totals since the worker joined.
FIELDS = (
    *("samples", "steps", "compute_s", "exchange_s", "wait_s", "pushes", "staleness", "dropped"),
    *("bytes_sent", "bytes_received", "cpu_s"),
    *("batch_size", "samples_per_s", "memory_bytes", "peak_memory_bytes", "gpu_use", "gpu_memory_bytes"),
)
_OF_SHARD = ("cores", "memory_bytes", "peak_memory_bytes")


@dataclass(frozen=True)
class WorkerPoint:
    """Numbers of all workers of a job at one time.

    Attributes:
        at: Unix time in seconds.
        workers: Numbers of each worker, in the order of :data:`FIELDS`.
        staleness: Number of pushes of each staleness, of all workers together.
        server: What the server uses, see :meth:`nfdt.core.host.usage.UsageMeter.of_process`.
        shards: Host, process and use of each shard.
    """

    at: float
    workers: Mapping[str, tuple[float, ...]]
    staleness: Mapping[int, int] = field(default_factory=dict)
    server: Mapping[str, float] = field(default_factory=dict)
    shards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain values."""
        return {**vars(self), "at": round(self.at, 3)}


def point_of(at: float, statistics: Mapping[str, Mapping[str, Any]]) -> WorkerPoint:
    """Return the point of the statistics of a job's workers, as in ``history.nfdt``."""
    workers: dict[str, tuple[float, ...]] = {}
    histogram: Counter[int] = Counter()
    for name, found in split_by_rank(statistics).items():
        bins = {int(tau): int(count) for tau, count in (found.get("staleness") or {}).items()}
        histogram.update(bins)
        sums = {"pushes": sum(bins.values()), "staleness": sum(tau * count for tau, count in bins.items())}
        workers[name] = tuple(round(float({**found, **sums}.get(key) or 0), 3) for key in FIELDS)
    return WorkerPoint(at, workers, dict(sorted(histogram.items())))


def _apart(
    job_id: str, shards: Sequence[pb.SlotDescription], statistics: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the shards of a job that are processes of their own; that of a ring is its first rank."""
    ranks = {(row.get("host"), row.get("pid")) for row in split_by_rank(statistics).values()}
    return {
        slot.process: {"host": slot.host, "pid": slot.pid, **{name: getattr(slot.usage, name) for name in _OF_SHARD}}
        for slot in shards
        if slot.job_id == job_id and (slot.host, slot.pid) not in ranks
    }


class WorkerSeries:
    """Recorder of points of all running jobs, on a thread of its own; methods may be called from any thread.

    Args:
        store: Jobs of the server.
        shards: Returns the slots of shards.
    """

    def __init__(self, store: JobStore, shards: Callable[[], Sequence[pb.SlotDescription]]) -> None:
        self._store, self._shards = store, shards
        self._meter = UsageMeter({})  # the server computes on no GPU
        self._lock = threading.Lock()
        self._points: dict[str, deque[WorkerPoint]] = {}
        self._last: dict[str, str] = {}  # statistics of each job's last point
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="series of the page", daemon=True)

    def start(self) -> None:
        """Begin to record."""
        self._thread.start()

    def stop(self) -> None:
        """Record no more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            try:
                self.record()
            except NotStored:  # the charts have a gap
                continue

    def record(self) -> None:
        """Add a point for each running job whose workers have reported."""
        found = [record for record in self._store.jobs(ACTIVE) if record.workers_json]
        shards = self._shards() if found else ()
        for record in found:
            self._add(record.job_id, record.workers_json or "", shards)

    def _add(self, job_id: str, statistics: str, shards: Sequence[pb.SlotDescription]) -> None:
        with self._lock:
            if self._last.get(job_id) == statistics:
                return
            while job_id not in self._points and len(self._points) >= KEPT:
                oldest = next(iter(self._points))
                del self._points[oldest], self._last[oldest]
            points = self._points.setdefault(job_id, deque(maxlen=LENGTH))
            self._last[job_id] = statistics
            workers = json.loads(statistics)
            point = point_of(self._store.now(), workers)
            points.append(replace(point, server=self._meter.of_process(), shards=_apart(job_id, shards, workers)))

    def after(self, job_id: str, at: float = 0.0) -> list[WorkerPoint]:
        """Return the points of a job that are younger than a time; none for a job that no worker has reported of."""
        with self._lock:
            return [point for point in self._points.get(job_id, ()) if point.at > at]
