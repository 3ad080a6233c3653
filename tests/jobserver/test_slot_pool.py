"""Slots that a job acquires, and messages that are accepted from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nfdt.core.errors import ProtocolError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_slots import SPARE_JOINS, JobSlots
from nfdt.jobserver.pool_slot import PoolSlot, SlotUser
from nfdt.jobserver.slot_pool import SlotPool


def hello(name="worker", **fields) -> pb.SlotHello:
    return pb.SlotHello(name=name, role="worker", **fields)


class Messages(list):
    def __call__(self, slot, kind, message):
        self.append((slot.name, kind))


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool()


def taken(pool, job_id, received, **options) -> PoolSlot:
    (slot,) = pool.assign(SlotUser(job_id, listener=received, **options), "worker", 1)
    slot.send(pb.Assignment(worker=pb.WorkerAssignment(job_id=job_id)))
    return slot


def finished(job_id) -> pb.SlotMessage:
    return pb.SlotMessage(finished=pb.SlotFinished(job_id=job_id))


def test_a_late_message_about_another_job_is_dropped(pool):
    received = Messages()
    pool.join(hello())
    slot = taken(pool, "first", Messages())
    pool.receive(slot, finished("first"))
    slot = taken(pool, "second", received)
    pool.receive(slot, finished("first"))
    assert received == []
    assert pool.attending("worker") == (1, 0)
    pool.receive(slot, finished("second"))
    assert received == [("worker", "finished")]
    assert pool.attending("worker") == (1, 1)


def test_a_slot_that_ran_code_of_another_session_is_dismissed_and_not_taken(pool):
    pool.join(hello())
    pool.receive(taken(pool, "job", Messages(), session="one", code=True), finished("job"))
    assert pool.assign(SlotUser("other", session="two"), "worker", 1) == []
    assert pool.attending("worker") == (0, 0)


def test_a_slot_that_is_about_to_end_is_not_taken_again(pool):
    received = Messages()
    pool.join(hello())
    slot = taken(pool, "job", received)
    pool.receive(slot, pb.SlotMessage(draining=pb.SlotDraining(grace_s=30)))
    assert received == [("worker", "draining")]
    pool.receive(slot, finished("job"))
    assert pool.attending("worker") == (0, 0)
    assert pool.assign(SlotUser("other"), "worker", 1) == []


def test_a_slot_that_was_taken_but_not_assigned_is_free_when_its_job_ends(pool):
    pool.join(hello())
    (slot,) = pool.assign(SlotUser("job", listener=Messages()), "worker", 1)
    pool.release(slot, "job")
    assert pool.attending("worker") == (1, 1)
    assigned = taken(pool, "job", Messages())
    pool.release(assigned, "job")
    assert pool.attending("worker") == (1, 0), "it has to answer first"


@pytest.mark.parametrize("field", ["name", "host", "device"])
def test_control_characters_of_a_slot_are_refused(field):
    with pytest.raises(ProtocolError, match="without control characters"):
        SlotPool().join(hello(**{field: "\x1b[2J"}))


@pytest.mark.parametrize("patience_s", [-1.0, float("nan")])
def test_a_patience_that_is_no_time_is_refused(pool, patience_s):
    with pytest.raises(ProtocolError, match="expected a patience"):
        pool.join(hello(key="k", patience_s=patience_s))
    assert pool.attending("worker") == (0, 0)


def test_an_earlier_stream_s_end_is_nothing_to_a_slot_that_came_back(pool):
    first = pool.join(hello(key="k", patience_s=60.0))
    second = pool.join(hello(key="k", patience_s=60.0))
    assert (second.slot, second.resumed, first.resumed) == (first.slot, True, False)
    pool.broke(first.slot, first.stream)
    pool.leave(first.slot, first.stream)
    assert pool.attending("worker") == (1, 1)
    pool.leave(first.slot, second.stream)
    assert pool.attending("worker") == (0, 0)


def test_what_a_slot_did_not_receive_is_sent_again_on_its_next_stream(pool):
    joined = pool.join(hello(key="k", patience_s=60.0))
    for job_id in ("first", "second", "third"):
        joined.slot.send(pb.Assignment(release=pb.Release(job_id=job_id)))
    sent = joined.slot.to_send.messages(joined.stream)
    assert [next(sent).release.job_id, next(sent).release.job_id] == ["first", "second"]
    again = pool.join(hello(key="k", patience_s=60.0), received=1)
    assert next(sent, None) is None
    sent = again.slot.to_send.messages(again.stream)
    assert [next(sent).release.job_id, next(sent).release.job_id] == ["second", "third"]


def test_a_message_that_is_sent_again_counts_once(pool):
    received = Messages()
    pool.join(hello(key="k", patience_s=60.0))
    slot = taken(pool, "job", received)
    ready = pb.SlotMessage(ready=pb.SlotReady(job_id="job"), number=1)
    pool.receive(slot, ready)
    pool.receive(slot, ready)
    assert received == [("worker", "ready")]


def test_the_number_of_workers_that_replace_lost_ones_is_limited(pool):
    spec = SimpleNamespace(code=False, versions={})
    slots = JobSlots(SimpleNamespace(pool=pool), "job", spec, "session", "token", wanted=2)
    for number in range(40):
        pool.join(hello(f"worker-{number}"))
    joined = sum(len(slots.acquire_workers(2)) for _ in range(20))
    assert 2 < joined <= 3 * 2 + SPARE_JOINS


@pytest.mark.parametrize(("boot", "host", "here"), [("b", "h", True), ("other", "h", False), ("b", "other", False)])
def test_a_slot_is_here_on_the_same_start_of_the_same_machine(boot, host, here):
    context = ServerContext(store=None, artifacts=None, pool=None, host="h", boot="b")
    assert context.is_here(hello(host=host, boot_id=boot)) is here
