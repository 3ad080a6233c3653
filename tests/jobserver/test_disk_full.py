"""Full disk for a while: jobs train on, nothing of them is lost, and they fail with the reason if it lasts."""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from nfdt.core.errors import NotStored
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import jobs_pb2
from nfdt.jobserver import job_log
from nfdt.jobserver.job_log import JobLog
from tests.support.fakes import DEADLINE_S, of


class Disk:
    """Store that takes no event of these kinds while it is full."""

    def __init__(self, monkeypatch) -> None:
        self.full = threading.Event()
        self._refuses: Callable[[str, dict[str, Any]], bool] = lambda kind, data: False
        real = JobStore._insert

        def insert(store, job_id, kind, data, at=None):
            if self.full.is_set() and self._refuses(kind, data):
                raise sqlite3.OperationalError("database or disk is full")
            return real(store, job_id, kind, data, at)

        monkeypatch.setattr(JobStore, "_insert", insert)

    def fill(self, refuses: Callable[[str, dict[str, Any]], bool]) -> None:
        self._refuses = refuses
        self.full.set()


class Folder:
    """Folder of artifacts that takes half of each while its disk is full."""

    def __init__(self, monkeypatch) -> None:
        self.full = threading.Event()
        fill, create = ArtifactStore._fill, ArtifactStore.create

        def fill_half(store, sha256, partial, digest, total, at, chunks):
            if self.full.is_set():
                partial.write_bytes(bytes(total // 2))
                raise OSError(errno.ENOSPC, "No space left on device")
            fill(store, sha256, partial, digest, total, at, chunks)

        @contextmanager
        def create_half(store, *sizes):
            with create(store, *sizes) as new:
                if self.full.is_set():
                    raise OSError(errno.ENOSPC, "No space left on device")
                yield new

        monkeypatch.setattr(ArtifactStore, "_fill", fill_half)
        monkeypatch.setattr(ArtifactStore, "create", create_half)


class Gate:
    """Gate that holds a worker inside its first task until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, slot, task) -> None:
        self.reached.set()
        assert self.open.wait(DEADLINE_S)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def folder(monkeypatch) -> Folder:
    return Folder(monkeypatch)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
def ended(monkeypatch) -> threading.Event:
    """Event that is set when a job has ended, whether or not its end could be written."""
    ended, real = threading.Event(), JobLog.end

    def end(job_log, outcome):
        real(job_log, outcome)
        ended.set()

    monkeypatch.setattr(JobLog, "end", end)
    return ended


def all_but_queued(kind, data) -> bool:
    return kind != "state" or data["state"] != "queued"


def kinds_of(events) -> list[tuple[str, str | None]]:
    return [(kind, data.get("state")) for kind, data in events if kind != "progress"]


def end_of(client, job) -> dict[str, Any]:
    kind, data = client.finish(job)[-1]
    assert kind == "state"
    return data


@pytest.mark.feature("The server's disk is full", area="Failures")
def test_a_job_trains_to_its_end_on_a_full_disk_and_its_events_are_written_once_there_is_room(start, disk, ended):
    client = start(shards=1, workers=2)
    disk.fill(all_but_queued)
    job = client.submit()
    assert ended.wait(DEADLINE_S)
    assert client.show(job).state == "queued"
    disk.full.clear()
    events, others = client.finish(job), client.finish(client.submit())
    assert kinds_of(events) == kinds_of(others)
    assert [data["epoch"] for data in of(events, "epoch_end")] == [0, 1]
    assert client.show(job).result_artifact == of(events, "result")[0]["artifact"]


def test_a_job_fails_with_the_reason_when_the_disk_stays_full(start, cluster, disk, gate, ended, monkeypatch):
    monkeypatch.setattr(job_log, "LIMIT_S", 0.2)
    client = start(shards=1)
    cluster.add("worker", on_task=gate)
    disk.fill(all_but_queued)
    job = client.submit(client.spec(workers=1))
    assert ended.wait(DEADLINE_S)
    assert client.show(job).state == "queued"
    disk.full.clear()
    end = end_of(client, job)
    assert end["state"] == "failed"
    assert f"Jobs in {cluster.state_dir}" in end["reason"]
    assert "disk is full" in end["reason"]
    assert "Make room" in end["reason"]
    assert "tried again" in end["reason"]


def test_the_state_at_the_end_of_an_epoch_waits_for_room_and_the_job_reports_it_once(start, cluster, folder):
    client = start(shards=1, workers=2)
    spec = client.spec()
    folder.full.set()
    job = client.submit(spec)
    text = client.until(job, "log", level="warning")["text"]
    assert f"cannot be written to {cluster.state_dir}" in text
    assert not list(cluster.state_dir.rglob("*.partial"))
    folder.full.clear()
    events = client.finish(job)
    assert events[-1][1]["state"] == "succeeded"
    assert [one["text"] for one in of(events, "log") if one["level"] == "warning"] == [text]
    assert [data["epoch"] for data in of(events, "epoch_end")] == [0, 1]


def test_a_job_fails_when_there_is_no_room_for_its_state(start, folder, monkeypatch):
    monkeypatch.setattr(job_log, "LIMIT_S", 0.2)
    client = start(shards=1, workers=2)
    spec = client.spec()
    folder.full.set()
    end = end_of(client, client.submit(spec))
    assert end["state"] == "failed"
    assert "No space left on device" in end["reason"]
    assert "Make room" in end["reason"]


def test_a_job_that_waits_for_room_can_be_cancelled(start, folder):
    client = start(shards=1, workers=2)
    spec = client.spec()
    folder.full.set()
    job = client.submit(spec)
    client.until(job, "log", level="warning")
    client.control(job, cancel=jobs_pb2.Cancel(reason="enough"))
    assert end_of(client, job)["state"] == "cancelled"


def test_a_snapshot_of_a_running_epoch_is_refused_on_a_full_disk_and_the_job_goes_on(start, cluster, folder, gate):
    client = start(shards=1)
    cluster.add("worker", on_task=gate)
    job = client.submit(client.spec(workers=1))
    assert gate.reached.wait(DEADLINE_S)
    folder.full.set()
    with pytest.raises(NotStored, match="cannot be written"):
        client.call("Snapshot", jobs_pb2.JobRef(job_id=job))
    folder.full.clear()
    gate.open.set()
    assert end_of(client, job)["state"] == "succeeded"


def test_a_submission_is_refused_at_once_on_a_full_disk(start, disk, folder):
    client = start(shards=1, workers=2)
    spec = client.spec()
    disk.fill(lambda kind, data: True)
    with pytest.raises(NotStored, match="disk is full.*Make room"):
        client.submit(spec)
    folder.full.set()
    with pytest.raises(NotStored, match="No space left on device.*Make room"):
        client.upload(b"other rows")


def test_an_accident_of_the_scheduler_does_not_end_it(start, cluster, monkeypatch):
    client = start(shards=1, workers=2)
    scheduler, happened = cluster.server.scheduler, threading.Event()
    real = scheduler._drop_ended

    def fail_once():
        monkeypatch.setattr(scheduler, "_drop_ended", real)
        happened.set()
        raise RuntimeError("out of the blue")

    monkeypatch.setattr(scheduler, "_drop_ended", fail_once)
    assert happened.wait(DEADLINE_S)
    assert end_of(client, client.submit())["state"] == "succeeded"


def test_a_run_that_gets_no_thread_fails_its_job_with_the_reason(start, cluster, monkeypatch):
    client = start(shards=1, workers=2)
    real = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("job-"):
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    job = client.submit()
    assert "can't start new thread" in end_of(client, job)["reason"]
    monkeypatch.setattr(threading.Thread, "start", real)
    assert end_of(client, client.submit())["state"] == "succeeded"
