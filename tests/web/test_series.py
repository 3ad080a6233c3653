"""Points of the workers' totals."""

from __future__ import annotations

import json

import pytest

from nfdt.core.host.usage import process_usage
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire.workers_pb2 import Usage
from nfdt.web import series
from nfdt.web.series import FIELDS, WorkerSeries, point_of

STATISTICS = {
    "worker-0": {"samples": 64, "steps": 2, "compute_s": 0.5, "staleness": {"0": 1, "3": 1}, "bytes_sent": 100},
    "worker-1": {"samples": 32, "steps": 1, "staleness": {"3": 1}},
}


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    yield store
    store.close()


def running(store: JobStore, job_id: str) -> None:
    store.add(job_id, "{}", session="", owner="ada")
    store.transition(job_id, "starting")


def test_a_point_has_the_totals_of_each_worker_and_the_staleness_of_all():
    point = point_of(7.0, STATISTICS)
    first = dict(zip(FIELDS, point.workers["worker-0"], strict=True))
    assert (first["samples"], first["pushes"], first["staleness"], first["bytes_sent"]) == (64, 2, 3, 100)
    assert point.staleness == {0: 1, 3: 2}
    assert json.loads(json.dumps(point.to_json()))["at"] == 7.0


def test_statistics_that_have_not_changed_are_no_point(store):
    running(store, "job-1")
    found = WorkerSeries(store, list)
    found.record()
    assert found.after("job-1") == []  # no worker has reported
    store.update("job-1", workers_json=json.dumps(STATISTICS))
    found.record()
    found.record()
    (point,) = found.after("job-1")
    assert point.server["cpu_s"] == pytest.approx(process_usage()["cpu_s"], rel=0.1)
    assert 0 < point.server["memory_bytes"] <= point.server["peak_memory_bytes"] + 2**20
    assert set(point.workers) == {"worker-0", "worker-1"}
    assert found.after("job-1", point.at) == []
    assert found.after("another") == []


def test_jobs_that_have_ended_keep_their_points_until_others_need_the_room(store, monkeypatch):
    monkeypatch.setattr(series, "KEPT", 1)
    found = WorkerSeries(store, list)
    running(store, "job-1")
    store.update("job-1", workers_json=json.dumps(STATISTICS))
    found.record()
    store.transition("job-1", "cancelled")
    found.record()
    assert len(found.after("job-1")) == 1
    running(store, "job-2")
    store.update("job-2", workers_json=json.dumps(STATISTICS))
    found.record()
    assert found.after("job-1") == []
    assert len(found.after("job-2")) == 1


def test_a_ring_has_the_numbers_of_each_rank():
    ranks = [{"samples": 30, "steps": 4, "compute_s": 1.0}, {"samples": 10, "steps": 4, "compute_s": 1.5}]
    ring = {"samples": 40, "steps": 4, "samples_per_s": 20.0, "bytes_sent": 7, "by_rank": ranks}
    point = point_of(1.0, {"worker-0": ring, "worker-1": {"samples": 5, "by_rank": []}})
    assert list(point.workers) == ["worker-0/rank-0", "worker-0/rank-1", "worker-1"]
    first, second = (dict(zip(FIELDS, point.workers[f"worker-0/rank-{rank}"], strict=True)) for rank in (0, 1))
    assert (first["samples"], first["samples_per_s"], first["bytes_sent"]) == (30, 15, 7)
    assert (second["samples"], second["samples_per_s"], second["bytes_sent"]) == (10, 5, 0)


def test_shards_are_shown_unless_they_are_the_first_rank_of_a_ring(store):
    def shard(job_id: str, process: str, pid: int) -> pb.SlotDescription:
        usage = Usage(cores=0.5, memory_bytes=7, peak_memory_bytes=9)
        return pb.SlotDescription(host="h", pid=pid, role="shard", job_id=job_id, process=process, usage=usage)

    running(store, "job-1")
    rank = {"samples": 1, "steps": 1, "host": "h", "pid": 5}
    store.update("job-1", workers_json=json.dumps({"worker-0": {**rank, "by_rank": [rank, {**rank, "pid": 6}]}}))
    slots = [shard("job-1", "shard-0", 5), shard("job-1", "shard-1", 8), shard("job-2", "shard-0", 9)]
    found = WorkerSeries(store, lambda: slots)
    found.record()
    (point,) = found.after("job-1")
    assert point.shards == {"shard-1": {"host": "h", "pid": 8, "cores": 0.5, "memory_bytes": 7, "peak_memory_bytes": 9}}
