"""Slots that a job acquires, and messages that are accepted from them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nfdt.core.clock import AwakeClock
from nfdt.core.errors import ProtocolError
from nfdt.core.specs.job import ClusterSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver import slot_pool
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_slots import SPARE_JOINS, JobSlots
from nfdt.jobserver.pool_slot import PoolSlot, SlotUser
from nfdt.jobserver.slot_pool import CODE_USERS, SlotPool
from tests.support.clocks import ManualClock


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


def test_each_session_runs_its_code_as_a_user_of_its_own(pool):
    for number in range(4):
        pool.join(hello(f"worker-{number}"))

    def sent(session, count=1, *, code=True):
        found = []
        for slot in pool.assign(SlotUser("job", listener=Messages(), session=session, code=code), "worker", count):
            assignment = pb.Assignment(worker=pb.WorkerAssignment(job_id="job"))
            slot.send(assignment)
            found.append(assignment.code_user if assignment.HasField("code_user") else None)
        return found

    first, again = sent("one", 2)
    assert first == again
    assert sent("two") == [(first + 1) % CODE_USERS]
    assert sent("three", code=False) == [None]


def test_the_user_of_a_session_is_taken_as_long_as_one_of_its_slots_lives(pool, monkeypatch):
    monkeypatch.setattr(slot_pool, "CODE_USERS", 2)
    slots = {}
    for session in ("one", "two"):
        pool.join(hello(session))
        slots[session] = taken(pool, session, Messages(), session=session, code=True)
    pool.join(hello("three"))
    waiting = SlotUser("three", session="three", code=True)
    assert pool.assign(waiting, "worker", 1) == []
    pool.leave(slots["one"])
    assert taken(pool, "three", Messages(), session="three", code=True).code_user == slots["one"].code_user


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
    spec = SimpleNamespace(code=False, versions={}, cluster=ClusterSpec())
    slots = JobSlots(SimpleNamespace(pool=pool), "job", spec, "session", "token", wanted=2)
    for number in range(40):
        pool.join(hello(f"worker-{number}"))
    joined = sum(len(slots.acquire_workers(2)) for _ in range(20))
    assert 2 < joined <= 3 * 2 + SPARE_JOINS


@pytest.mark.parametrize(("boot", "host", "here"), [("b", "h", True), ("other", "h", False), ("b", "other", False)])
def test_a_slot_is_here_on_the_same_start_of_the_same_machine(boot, host, here):
    context = ServerContext(store=None, artifacts=None, pool=None, host="h", boot="b")
    assert context.is_here(hello(host=host, boot_id=boot)) is here


HEARTBEAT = pb.SlotMessage(heartbeat=pb.SlotHeartbeat())


class SilentPool:
    """Pool on a clock that a test sets, with a slot of a job; ``received`` is what the job hears of it."""

    def __init__(self, **cluster) -> None:
        self.machine, self.received = ManualClock(), Messages()
        self.pool = SlotPool(clock=AwakeClock(self.machine))
        joined = self.pool.join(hello(key="k", patience_s=60.0))
        self.stream = joined.stream
        self.slot = taken(self.pool, "job", self.received, cluster=ClusterSpec(**cluster))

    def beat(self) -> None:
        self.pool.receive(self.slot, HEARTBEAT)

    def advance(self, seconds: float, step_s: float = 0.5) -> None:
        """Let time pass; the pool looks at its slots every ``step_s``."""
        for _ in range(round(seconds / step_s)):
            self.machine.advance(step_s)
            self.pool.remove_silent()


def test_a_slot_without_a_sign_of_life_is_lost_and_may_register_again():
    silent = SilentPool()
    silent.beat()
    silent.advance(8.0)
    assert silent.received == []
    silent.advance(0.5)
    assert silent.received == [("worker", "lost")]
    assert "for 8 s" in silent.slot.silence
    again = silent.pool.join(hello(key="k", patience_s=60.0))
    assert (again.resumed, again.slot.silence) == (False, "")
    assert silent.pool.attending("worker") == (1, 1)


def test_any_message_is_a_sign_of_life():
    silent = SilentPool()
    silent.beat()
    for _ in range(5):
        silent.advance(6.0)
        silent.pool.receive(silent.slot, pb.SlotMessage(output=pb.SlotOutput(job_id="job")))
    assert ("worker", "lost") not in silent.received
    assert silent.pool.silent_s(silent.slot) == 0.0


def test_a_job_says_after_how_long_its_slots_are_lost_and_how_often_they_send_heartbeats():
    silent = SilentPool(heartbeat_s=5.0, lost_s=30.0)
    silent.beat()
    silent.advance(30.0)
    assert silent.received == []
    assert silent.slot.heartbeat_s == 5.0
    silent.advance(0.5)
    assert silent.received == [("worker", "lost")]


def test_a_job_with_short_limits_does_not_lose_a_slot_for_the_silence_before_it():
    silent = SilentPool()
    silent.beat()
    silent.pool.receive(silent.slot, finished("job"))
    silent.advance(2.0)
    taken(silent.pool, "other", silent.received, cluster=ClusterSpec(heartbeat_s=0.2, lost_s=1.0))
    silent.advance(1.0)
    assert ("worker", "lost") not in silent.received
    silent.advance(0.5)
    assert silent.received[-1] == ("worker", "lost")


def test_a_slot_that_sends_no_heartbeats_may_be_silent():
    silent = SilentPool()
    silent.advance(100.0)
    assert silent.received == []
    assert silent.pool.silent_s(silent.slot) is None


def test_the_time_for_which_the_server_stood_still_is_no_silence_of_its_slots():
    silent = SilentPool()
    silent.beat()
    silent.advance(300.0, step_s=100.0)
    assert silent.received == []
    silent.advance(6.0)
    assert silent.received == [("worker", "lost")]


def test_a_broken_stream_is_awaited_no_longer_than_silence_lasts():
    silent = SilentPool()

    class Passing(AwakeClock):
        """Clock that goes on by a second each time it is read."""

        def now(self) -> float:
            silent.machine.advance(1.0)
            return super().now()

    silent.pool._clock = Passing(silent.machine)
    silent.pool.lose(silent.slot, silent.stream)
    assert silent.received == [("worker", "lost")]
    assert silent.machine.now() < 15.0, "its patience is 60 s"


def test_on_a_server_with_many_slots_heartbeats_are_rare_and_silence_is_long(monkeypatch):
    monkeypatch.setattr("nfdt.jobserver.slot_pool.BEATS_PER_S", 1)
    silent = SilentPool()
    silent.beat()
    assert silent.pool.beat(silent.slot).heartbeat.every_s == 2.0
    for number in range(6):
        silent.pool.join(hello(f"other-{number}", key=f"other-{number}"))
    assert silent.pool.beat_in_s(silent.slot) == 2.0, "the interval has changed, so the next one is soon"
    assert silent.pool.beat(silent.slot).heartbeat.every_s == 8.0  # 7 slots, one heartbeat a second
    assert silent.pool.beat_in_s(silent.slot) == 32.0
    silent.advance(6.0)
    assert silent.pool.silent_s(silent.slot) == 1.5, "as if it had been 6 of 8 s, of 2"
    silent.advance(26.0)
    assert silent.received == []
    silent.advance(0.5)
    assert silent.received == [("worker", "lost")]
    assert "for 32 s" in silent.slot.silence


def test_when_slots_leave_the_others_have_time_to_learn_their_shorter_interval(monkeypatch):
    monkeypatch.setattr("nfdt.jobserver.slot_pool.BEATS_PER_S", 1)
    silent = SilentPool()
    others = [silent.pool.join(hello(f"other-{number}", key=f"other-{number}")).slot for number in range(6)]
    silent.beat()
    assert silent.pool.beat(silent.slot).heartbeat.every_s == 8.0
    for other in others:
        silent.pool.leave(other)
    silent.advance(20.0)
    assert silent.received == [], "it has not been told yet"
    assert silent.pool.beat(silent.slot).heartbeat.every_s == 2.0
    silent.advance(8.0)
    assert silent.received == []
    silent.advance(0.5)
    assert silent.received == [("worker", "lost")]
