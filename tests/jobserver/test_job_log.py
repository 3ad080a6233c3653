"""Records of a job in the store."""

from __future__ import annotations

import itertools
import logging
import sqlite3
import threading

import pytest

from nfdt.core.errors import NotStored
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.messages import MOST_CHARACTERS, MOST_LINES
from nfdt.jobserver.job_log import LIMIT_S, JobLog
from nfdt.jobserver.outcome import JobOutcome
from tests.support.clocks import ManualClock

LONG = "x" * 10_000  # needs more pages than the database has


@pytest.fixture
def artifacts(tmp_path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite", now=itertools.count().__next__)
    store.add("job", "{}", session="", owner="")
    yield store
    store.close()


def test_a_checkpoint_takes_the_place_of_the_one_before(store, artifacts):
    job_log = JobLog(store, artifacts, "job", frozenset(), ManualClock())
    first, second = artifacts.put(b"first"), artifacts.put(b"second")
    job_log.checkpoint(first, 1)
    job_log.checkpoint(second, 1)
    assert (artifacts.has(first), artifacts.has(second)) == (False, True)
    assert store.get("job").checkpoint_artifact == second


def test_a_checkpoint_that_is_the_same_as_the_one_before_stays(store, artifacts):
    job_log = JobLog(store, artifacts, "job", frozenset(), ManualClock())
    same = artifacts.put(b"same")
    job_log.checkpoint(same, 1)
    job_log.checkpoint(same, 1)
    assert artifacts.has(same)


def test_a_checkpoint_that_is_what_the_job_began_with_is_kept(store, artifacts):
    start, later = artifacts.put(b"start"), artifacts.put(b"later")
    job_log = JobLog(store, artifacts, "job", frozenset({start}), ManualClock())
    job_log.checkpoint(start, 1)
    job_log.checkpoint(later, 1)
    assert artifacts.has(start)


class Disk:
    """Disk of a database; SQLite itself reports that it is full."""

    def __init__(self, store: JobStore) -> None:
        self._database = store._database

    def fill(self) -> None:
        self._database.execute("PRAGMA max_page_count=1")  # as many pages as there are already

    def clear(self) -> None:
        self._database.execute("PRAGMA max_page_count=1000000")


@pytest.fixture
def disk(store) -> Disk:
    return Disk(store)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def job_log(store, artifacts, clock) -> JobLog:
    job_log = JobLog(store, artifacts, "job", frozenset(), clock)
    job_log.enter("starting")
    job_log.enter("running")
    return job_log


def later(store) -> list[tuple[str, str]]:
    """Return kind and first letter of the events after the job's first states."""
    return [(one.kind, (one.data.get("text") or one.data.get("state"))[0]) for one in store.events("job", after=3)]


def test_records_stay_in_memory_while_the_disk_is_full_and_are_written_in_order(store, disk, job_log, caplog):
    caplog.set_level(logging.WARNING)
    disk.fill()
    for name in "abc":
        job_log.write("info", name + LONG)
    job_log.end(JobOutcome("succeeded"))
    job_log.retry()
    assert later(store) == []
    assert store.get("job").state == "running"
    disk.clear()
    job_log.flush()
    assert later(store) == [("log", "a"), ("log", "b"), ("log", "c"), ("state", "s")]
    assert [one.cursor for one in store.events("job")] == list(range(1, 8))
    times = [one.at for one in store.events("job")]
    assert times == sorted(times)
    assert times[-1] - times[-4] == 3, "the times of the records, not of their writing"
    (line,) = caplog.messages
    assert "disk is full" in line
    assert f"tried again for {LIMIT_S:.0f} s" in line


def test_the_next_record_writes_those_before_it(store, disk, job_log):
    disk.fill()
    job_log.write("info", "a" + LONG)
    disk.clear()
    job_log.write("info", "b")
    assert later(store) == [("log", "a"), ("log", "b")]


def test_a_disk_that_stays_full_is_an_error_after_the_limit_and_what_follows_is_still_kept(
    store, disk, job_log, clock, tmp_path
):
    disk.fill()
    job_log.write("info", "a" + LONG)
    clock.advance(LIMIT_S - 1)
    job_log.retry()
    clock.advance(1)
    with pytest.raises(NotStored, match="disk is full.*Make room.*tried again for 60 s") as caught:
        job_log.retry()
    assert str(tmp_path) in str(caught.value)
    job_log.end(JobOutcome("failed", str(caught.value)))
    disk.clear()
    job_log.flush()
    assert later(store) == [("log", "a"), ("state", "f")]


def test_the_limit_begins_anew_once_there_was_room(disk, job_log, clock):
    for _ in range(2):
        disk.fill()
        job_log.write("info", "a" + LONG)
        clock.advance(LIMIT_S - 1)
        job_log.retry()
        disk.clear()
        job_log.retry()


def test_an_event_is_not_doubled_when_only_the_description_of_its_job_finds_no_room(store, job_log, monkeypatch):
    full, real = iter([True, False]), store.update

    def update(job_id, **facts):
        if next(full):
            raise NotStored("disk is full")
        real(job_id, **facts)

    monkeypatch.setattr(store, "update", update)
    job_log.record("epoch_begin", {"epoch": 3, "steps": 1})
    assert store.get("job").epoch == 0
    job_log.retry()
    assert [one.kind for one in store.events("job", after=3)] == ["epoch_begin"]
    assert store.get("job").epoch == 3


def test_records_of_several_threads_are_written_once_and_in_order(store, job_log, monkeypatch):
    full, real = itertools.cycle([False, True, True]), JobStore._insert

    def insert(*arguments):
        if next(full):
            raise sqlite3.OperationalError("database or disk is full")
        return real(*arguments)

    monkeypatch.setattr(JobStore, "_insert", insert)

    def work(name: str) -> None:
        for number in range(50):
            job_log.write("info", f"{name}{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(JobStore, "_insert", real)
    job_log.retry()
    texts = [one.data["text"] for one in store.events("job", after=3)]
    for name in "abc":
        assert [text for text in texts if text[0] == name] == [f"{name}{number}" for number in range(50)]
    assert len(texts) == 150


def test_the_artifact_of_an_unwritten_checkpoint_is_not_deleted(store, artifacts, disk, job_log):
    state, later = artifacts.put(b"state"), artifacts.put(b"later")
    disk.fill()
    job_log.write("info", "a" + LONG)
    job_log.checkpoint(state, 1)
    job_log.passing(state)
    job_log.passing(later)
    with pytest.raises(NotStored):
        job_log.needed()
    disk.clear()
    assert job_log.needed() == {state, later}
    assert artifacts.has(store.get("job").checkpoint_artifact)


def logged(store: JobStore) -> list[dict]:
    return [event.data for event in store.events("job", limit=10 * MOST_LINES) if event.kind == "log"]


def test_output_cannot_control_a_terminal_and_is_bounded(store, artifacts):
    job_log = JobLog(store, artifacts, "job", frozenset(), ManualClock())
    lines = [("info", "plain\ttext"), ("critical", "\x1b[2Jgone"), ("error", "x" * 5000), ("info", " ")]
    job_log.output("worker-0", [pb.OutputLine(level=level, text=text) for level, text in lines])
    assert [(data["worker"], data["level"], data["text"]) for data in logged(store)] == [
        ("worker-0", "info", "plain\ttext"),
        ("worker-0", "info", "\N{REPLACEMENT CHARACTER}[2Jgone"),
        ("worker-0", "error", "x" * MOST_CHARACTERS),
    ]
    job_log.output("worker-0", [pb.OutputLine(text=str(number)) for number in range(3 * MOST_LINES)])
    job_log.output("worker-1", [pb.OutputLine(text="another")])
    found = [data["worker"] for data in logged(store)]
    assert found.count("worker-0") == 2 * MOST_LINES
    assert found[-1] == "worker-1"
