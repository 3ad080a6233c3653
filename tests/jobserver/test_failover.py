"""Failover of a ring's leader: calls to the shard wait for the next leader, which gets the last instruction again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.topologies.failover import FailoverShardClients, LeaderFailover

DEADLINE_S = 30.0


class Shard:
    """Client of a shard whose process may be gone."""

    def __init__(self, name: str, alive: bool = True) -> None:
        self.name, self.alive, self.asked, self.closed = name, alive, threading.Event(), False

    def read(self):
        self.asked.set()
        if not self.alive:
            raise ServerUnreachable(f"{self.name} is gone")
        return self.name

    def set_learning_rate(self, value):
        self.received = [*getattr(self, "received", []), value]

    write = set_learning_rate

    def flush(self):
        pass

    def close(self) -> None:
        self.closed = True


def in_background(call):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers


def test_a_call_is_made_again_to_the_next_rank():
    first = Shard("first", alive=False)
    shard = FailoverShardClients(first, DEADLINE_S)
    thread, answers = in_background(shard.read)
    assert first.asked.wait(DEADLINE_S)
    shard.replace(Shard("second", alive=False))
    shard.replace(Shard("third"))
    thread.join(DEADLINE_S)
    assert answers == ["third"]
    shard.close()
    assert first.closed


def test_what_the_last_rank_may_not_have_passed_on_is_repeated():
    shard = FailoverShardClients(Shard("first"), DEADLINE_S)
    shard.write("old")
    shard.flush()
    shard.set_learning_rate(0.5)
    shard.write("new")
    for fresh, repeated in ((True, [0.5, "new"]), (False, [0.5])):
        following = Shard("next")
        shard.replace(following)
        shard.repeat(fresh=fresh)
        assert following.received == repeated


def test_what_an_epoch_began_with_is_not_repeated_after_its_end():
    shard = FailoverShardClients(Shard("first"), DEADLINE_S)
    shard.write("old")
    shard.flush()
    following = Shard("next")
    shard.replace(following)
    shard.repeat(fresh=True)
    assert not hasattr(following, "received")


def test_a_call_ends_when_no_rank_takes_over_in_time_or_the_job_ends():
    with pytest.raises(ServerUnreachable, match="No rank of the ring answers"):
        FailoverShardClients(Shard("first", alive=False), 0.05).read()
    shard = FailoverShardClients(Shard("first", alive=False), DEADLINE_S)
    shard.close()
    with pytest.raises(ServerUnreachable):
        shard.read()


@dataclass
class Ring:
    failure: str | None = None
    log: str = "the log"

    def why(self):
        return JobFailed(self.failure) if self.failure else None

    def report(self):
        return None


@dataclass
class JobSlots:
    """Slots of a shard and a worker that are gone; ``next_one`` is set when another slot registers."""

    next_one: threading.Event
    started: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shards = [JobSlot(None, "shard-0", 0, failing_over=True)]
        self.worker = JobSlot(None, "worker-0", 0, failing_over=True)

    def living(self):
        return [self.worker]

    def take_over(self, shard, worker):
        if not self.next_one.is_set():
            return False
        shard.failing_over = worker.failing_over = False
        return True

    def start_shard(self, job_slot):
        self.started.append("shard")
        job_slot.address = "127.0.0.1:1"

    def start_worker(self, job_slot, here):
        self.started.append("worker")


class Pool:
    def wait(self, timeout_s):
        threading.Event().wait(0.001)


class Coordinator:
    def __init__(self) -> None:
        self.resumed_by = threading.Event()
        self.fresh = True

    def resumed(self, worker, details):
        self.resumed_by.set()


@pytest.fixture
def lost_leader(monkeypatch):
    monkeypatch.setattr(JobSlot, "details", {})
    ring, slots, coordinator = Ring(), JobSlots(threading.Event()), Coordinator()
    failures: list[BaseException] = []
    changed, failed = threading.Condition(), threading.Event()

    def fail(error: BaseException) -> None:
        failures.append(error)
        failed.set()

    def begin(deadline_s: float) -> LeaderFailover:
        made = LeaderFailover(
            ring, slots, Pool(), changed, lambda: Shard("next"), deadline_s, first=Shard("first", alive=False)
        )
        with changed:
            made.begin(coordinator, fail)
            made.begin(coordinator, fail)  # the end of its second slot is reported
        return made

    return ring, slots, coordinator, (failures, failed), begin


def test_the_next_rank_is_acquired_asked_to_serve_and_then_to_work(lost_leader):
    _, slots, coordinator, failures, begin = lost_leader
    failover = begin(DEADLINE_S)
    slots.next_one.set()
    assert failover.shard.read() == "next"
    assert coordinator.resumed_by.wait(DEADLINE_S)
    assert slots.started == ["shard", "worker"]
    assert failures[0] == []


@pytest.mark.parametrize(("failure", "reason"), [(None, "another one within 0 s"), ("it ended", "it ended")])
def test_a_ring_without_another_rank_fails_the_job_with_the_reason(lost_leader, failure, reason):
    ring, _, _, (failures, failed), begin = lost_leader
    ring.failure = failure
    failover = begin(0.0)
    assert failed.wait(DEADLINE_S)
    assert reason in str(failures[0])
    with pytest.raises(ServerUnreachable):
        failover.shard.read()


def test_whatever_goes_wrong_while_another_rank_is_started_fails_the_job(lost_leader):
    _, slots, _, (failures, failed), begin = lost_leader

    def start_shard(job_slot):
        raise RuntimeError("can't start new thread")

    slots.start_shard = start_shard
    slots.next_one.set()
    begin(DEADLINE_S)
    assert failed.wait(DEADLINE_S)
    assert "new thread" in str(failures[0])
