"""Spans of a process, and their delivery."""

from __future__ import annotations

import threading
import time

import pytest

from nfdt.core.errors import NotStored, ProtocolError, ServerUnreachable
from nfdt.core.jobs import store as stores
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.store import JobStore
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.spans import CAPACITY, COMPUTE, SPAN, WAIT, SpanRing, read_spans, track_of
from nfdt.jobserver.job_log import JobLog
from nfdt.worker.span_sender import ClockEstimate, delivered_spans
from tests.support.clocks import ManualClock


@pytest.fixture
def store(tmp_path):
    store = JobStore(tmp_path / "jobs.sqlite")
    store.add("job", "{}", session="", owner="")
    yield store
    store.close()


@pytest.fixture
def notes(store, tmp_path):
    artifacts = ArtifactStore(tmp_path / "artifacts")
    return JobLog(store, artifacts, "job", frozenset(), ManualClock())


def message(count: int, began: float = 0.0) -> pb.SlotMessage:
    ring = SpanRing()
    for number in range(count):
        ring.add(COMPUTE, began + number, began + number + 0.5, number)
    return pb.SlotMessage(spans=pb.SlotSpans(records=ring.drain(), offset_s=1.0, error_s=0.1))


def test_spans_are_taken_once_in_unix_time():
    ring, now = SpanRing(), time.perf_counter()
    ring.add(WAIT, now, now + 0.25, 7, track=3)
    ring.add(COMPUTE, now + 1, now + 2, 2**33 + 5)
    found = read_spans([ring.drain()])
    assert found["kind"].tolist() == [WAIT, COMPUTE]
    assert found["value"].tolist() == [7, 5]
    assert found["track"].tolist() == [3, 0]
    assert found["seconds"].tolist() == [0.25, 1.0]
    assert abs(found["start"][0] - time.time()) < 60
    assert found["start"][1] - found["start"][0] == pytest.approx(1, abs=1e-5)
    assert ring.drain() == b""


def test_the_oldest_spans_are_lost():
    ring = SpanRing()
    for number in range(CAPACITY + 10):
        ring.add(COMPUTE, number, number, number)
    found = read_spans([ring.drain()])
    assert len(found) == CAPACITY
    assert found["value"][0] == 10


def test_the_track_of_a_worker_is_its_number():
    assert [track_of(name) for name in ("worker-7", "worker-70000", "x", "a-b")] == [7, 70000 - 65536, 0, 0]


def test_a_clock_is_estimated_from_the_shortest_round_trip():
    times = iter([100.0, 104.0, 200.0, 200.2, 300.0, 302.0])  # asked, answered; three times
    answers = iter([1002.0, 1100.1, 1201.0])
    clock = ClockEstimate(lambda: next(answers), lambda: next(times))
    clock.renew()
    assert (clock.offset_s, clock.error_s) == (pytest.approx(900), pytest.approx(0.1))


def test_a_server_that_does_not_answer_leaves_the_estimate():
    def ask():
        raise ServerUnreachable("no")

    clock = ClockEstimate(ask)
    clock.renew()
    assert clock.offset_s == 0


def test_a_delivery_can_be_asked_for():
    ring, arrived = SpanRing(), threading.Event()
    with delivered_spans(ring, ClockEstimate(time.time), lambda spans: arrived.set(), every_s=1000):
        ring.add(COMPUTE, 0, 1)
        ring.flush()
        assert arrived.wait(60)


def test_spans_are_delivered_while_a_job_runs_and_at_its_end():
    ring, sent, arrived = SpanRing(), [], threading.Event()

    def send(spans):
        sent.append(len(read_spans([spans.records])))
        arrived.set()

    ring.add(COMPUTE, 0, 1)
    with delivered_spans(ring, ClockEstimate(time.time), send, every_s=0.01):
        assert arrived.wait(60)
        assert sent == [1]
        ring.add(COMPUTE, 1, 2)
        ring.add(COMPUTE, 2, 3)
    assert sum(sent) == 3


@pytest.mark.parametrize("records", [b"x", bytes(SPAN.itemsize * (CAPACITY + 1))])
def test_what_is_no_spans_or_too_many_is_refused(notes, store, records):
    with pytest.raises(ProtocolError, match=f"Spans of worker-0: expected at most {CAPACITY} records"):
        notes.write_message("worker-0", pb.SlotMessage(spans=pb.SlotSpans(records=records)))
    assert store.spans("job") == []


def test_the_latest_spans_of_each_process_are_kept(notes, store, monkeypatch):
    monkeypatch.setattr(stores, "SPAN_BYTES", 30 * SPAN.itemsize)
    for began in range(0, 100, 10):
        notes.write_message("worker-0", message(10, began))
    notes.write_message("worker-1", message(3))
    kept = store.spans("job")
    assert [each.process for each in kept] == ["worker-0"] * 3 + ["worker-1"]
    assert (kept[0].offset_s, kept[0].error_s) == (1.0, 0.1)
    assert len(read_spans([each.records for each in kept[:3]])) == 30


def test_spans_go_with_their_job(notes, store):
    notes.write_message("worker-0", message(1))
    store.transition("job", "cancelled")
    store.delete("job")
    assert store.spans("job") == []


def test_a_full_disk_leaves_a_gap(notes, store, monkeypatch):
    def full(*_):
        raise NotStored("full")

    monkeypatch.setattr(store, "add_spans", full)
    notes.write_message("worker-0", message(1))
    assert store.spans("job") == []


def test_stored_bytes_are_those_of_a_ring():
    assert stores.SPAN_BYTES == CAPACITY * SPAN.itemsize
