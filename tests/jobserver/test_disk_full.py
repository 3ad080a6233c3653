"""Full disk for a while: jobs fail with the reason, and the server continues once there is room."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest

from nfdt.core.jobs.store import JobStore
from tests.support.fakes import DEADLINE_S


class Disk:
    """Store that takes no event of these kinds while it is full."""

    def __init__(self, monkeypatch) -> None:
        self.full = threading.Event()
        self.end_refused = threading.Event()
        self._refuses: Callable[[str, dict[str, Any]], bool] = lambda kind, data: False
        real = JobStore._insert

        def insert(store, job_id, kind, data):
            if self.full.is_set() and self._refuses(kind, data):
                if kind == "state" and data["state"] in ("failed", "succeeded"):
                    self.end_refused.set()
                raise sqlite3.OperationalError("database or disk is full")
            return real(store, job_id, kind, data)

        monkeypatch.setattr(JobStore, "_insert", insert)

    def fill(self, refuses: Callable[[str, dict[str, Any]], bool]) -> None:
        self._refuses = refuses
        self.full.set()


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def end_of(client, job) -> dict[str, Any]:
    kind, data = client.finish(job)[-1]
    assert kind == "state"
    return data


def test_a_job_that_fails_before_it_begins_is_reported_once_there_is_room_and_others_run(start, disk):
    client = start(shards=1, workers=2)
    spec = client.spec(workers=5, start_timeout_s=0.1)
    other = client.spec()
    disk.fill(lambda kind, data: kind != "state" or data["state"] != "queued")
    job = client.submit(spec)
    assert disk.end_refused.wait(DEADLINE_S)
    disk.full.clear()
    end = end_of(client, job)
    assert (end["state"], "full" in end["reason"]) == ("failed", True)
    assert end_of(client, client.submit(other))["state"] == "succeeded"


def test_a_job_whose_end_cannot_be_stored_ends_once_there_is_room(start, disk):
    client = start(shards=1, workers=2)
    disk.fill(lambda kind, data: kind == "epoch_end" or (kind == "state" and data["state"] in ("failed", "succeeded")))
    job = client.submit()
    assert disk.end_refused.wait(DEADLINE_S)
    assert client.show(job).state == "running"
    disk.full.clear()
    end = end_of(client, job)
    assert (end["state"], "disk is full" in end["reason"]) == ("failed", True)
    assert end_of(client, client.submit())["state"] == "succeeded"


def test_an_accident_of_the_scheduler_does_not_end_it(start, cluster, monkeypatch):
    client = start(shards=1, workers=2)
    scheduler, happened = cluster.server._scheduler, threading.Event()
    real = scheduler._forget_ended

    def fail_once():
        monkeypatch.setattr(scheduler, "_forget_ended", real)
        happened.set()
        raise RuntimeError("out of the blue")

    monkeypatch.setattr(scheduler, "_forget_ended", fail_once)
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
