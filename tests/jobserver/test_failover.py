"""Failover of a ring's leader: calls to the shard wait for the next leader, which gets the last instruction again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from nfdt.core.clock import SystemClock
from nfdt.core.errors import JobCancelled, JobFailed, ServerUnreachable
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.topologies.allreduce import LeaderFailover
from tests.support.served_mailbox import DEADLINE_S, ServedMailbox


class Shard:
    """Client of a shard whose process may be gone."""

    def __init__(self, name: str, alive: bool = True) -> None:
        self.name, self.alive, self.closed = name, alive, False
        self.received: list = []

    def save(self, *_, **__):
        if not self.alive:
            raise ServerUnreachable(f"{self.name} is gone")
        return self.name

    def write(self, value):
        self.save()
        self.received.append(value)

    set_learning_rate = write

    def flush(self):
        pass

    def close(self) -> None:
        self.closed = True


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
    """Slots of a shard and a worker; one more rank can take over for each release of ``ranks``.

    ``looks`` is released at each look at them. ``serve`` is called with the shard when a rank is asked to serve; it
    sets the address, or reports a loss.
    """

    ranks: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    looks: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    started: list[str] = field(default_factory=list)
    resumed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.shards, self.worker = [JobSlot(None, "shard-0", 0)], JobSlot(None, "worker-0", 0)
        self.serve = lambda shard: setattr(shard, "address", "127.0.0.1:1")

    def living(self):
        self.looks.release()
        return [self.worker]

    def take_over(self, shard, worker):
        assert all(position.failing_over for position in (shard, worker)), "the last rank is there"
        if not self.ranks.acquire(blocking=False):
            return False
        shard.failing_over = worker.failing_over = False
        return True

    def start_shard(self, job_slot):
        self.started.append("shard")
        self.serve(job_slot)

    def start_worker(self, job_slot, here):
        self.started.append("worker")


class LostLeader:
    """Failover of a ring; the leaders' shards are ``clients`` in their order, the first of which is gone."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(JobSlot, "details", {})
        self.ring, self.slots, self.mailbox = Ring(), JobSlots(), ServedMailbox(SystemClock())
        self.clients, self.made = [Shard("first", alive=False), Shard("next")], 0
        self.coordinator = SimpleNamespace(fresh=True, resumed=lambda worker, details: self.slots.resumed.set())
        self.failures = self.mailbox.failures
        self.failover: LeaderFailover | None = None

    def connect(self) -> Shard:
        self.made += 1
        return self.clients[self.made - 1]

    def make(self, deadline_s: float = DEADLINE_S) -> LeaderFailover:
        parts = SimpleNamespace(
            server=SimpleNamespace(clock=SystemClock()),
            job_id="job-1",
            slots=self.slots,
            mailbox=self.mailbox,
            connect_shards=self.connect,
            job_log=SimpleNamespace(retry=lambda: None, stalled=lambda missing, seconds: None),
        )
        self.failover = LeaderFailover(parts, self.coordinator, self.ring, deadline_s)
        return self.failover

    def lose(self, *positions: JobSlot) -> None:
        def lose() -> None:
            for position in positions or (self.slots.shards[0], self.slots.worker):
                self.failover.lose(position, "it was killed")

        self.mailbox.handle(lose)

    def begin(self, deadline_s: float = DEADLINE_S) -> LeaderFailover:
        self.make(deadline_s)
        self.lose()
        return self.failover


@pytest.fixture
def lost(monkeypatch):
    lost = LostLeader(monkeypatch)
    yield lost
    if lost.failover is not None:
        lost.mailbox.handle(lost.failover.close)
        lost.failover.shards.close()
    lost.mailbox.close()


def test_the_next_rank_is_acquired_asked_to_serve_and_then_to_work(lost):
    failover = lost.begin()
    lost.slots.ranks.release()
    assert failover.shards.save(None, None) == "next"
    assert lost.slots.resumed.wait(DEADLINE_S)
    assert lost.slots.started == ["shard", "worker"]
    assert lost.failures == []
    assert not failover.running


@pytest.mark.parametrize("fresh", [True, False])
def test_a_state_that_no_step_has_changed_yet_is_written_to_the_next_leader(lost, fresh):
    first, following = lost.clients
    first.alive, lost.coordinator.fresh = True, fresh
    failover = lost.make()
    failover.shards.set_learning_rate(0.5)
    failover.shards.write("state")
    first.alive = False
    lost.lose()
    lost.slots.ranks.release()
    assert lost.slots.resumed.wait(DEADLINE_S)
    assert following.received == ([0.5, "state"] if fresh else [0.5])


def test_no_rank_takes_over_before_both_positions_of_the_last_one_are_lost(lost):
    lost.make()
    lost.slots.ranks.release()
    lost.lose(lost.slots.shards[0])
    for _ in range(3):  # a rank that may take over is there all the time
        assert lost.slots.looks.acquire(timeout=DEADLINE_S)
    assert lost.slots.started == []
    lost.lose(lost.slots.worker)
    assert lost.slots.resumed.wait(DEADLINE_S)


def test_a_leader_that_is_lost_before_it_serves_is_replaced_too(lost):
    def die(shard):
        lost.slots.serve = lambda shard: setattr(shard, "address", "127.0.0.1:1")
        for position in (shard, lost.slots.worker):
            lost.failover.lose(position, "it was killed as well")

    lost.slots.serve = die
    failover = lost.begin()
    lost.slots.ranks.release(2)
    assert lost.slots.resumed.wait(DEADLINE_S)
    assert lost.slots.started == ["shard", "shard", "worker"]
    assert failover.shards.save(None, None) == "next"


def test_a_leader_that_does_not_answer_is_replaced_once_its_loss_is_reported(lost):
    silent = Shard("silent", alive=False)
    lost.clients.insert(1, silent)
    lost.clients[0].alive = True
    failover = lost.make()
    failover.shards.set_learning_rate(0.5)
    lost.lose()
    lost.slots.ranks.release(2)
    lost.mailbox.wait_until(lambda: silent.closed)
    lost.lose()
    assert lost.slots.resumed.wait(DEADLINE_S)
    assert failover.shards.save(None, None) == "next"
    assert lost.slots.started == ["shard", "shard", "worker"]


@pytest.mark.parametrize(("failure", "reason"), [(None, "another one within 0 s"), ("it ended", "it ended")])
def test_a_ring_without_another_rank_fails_the_job_with_the_reason(lost, failure, reason):
    lost.ring.failure = failure
    failover = lost.begin(0.0)
    lost.mailbox.wait_until(lambda: lost.failures)
    assert reason in str(lost.failures[0])
    with pytest.raises(ServerUnreachable):
        failover.shards.save(None, None)


def test_whatever_goes_wrong_while_another_rank_is_started_fails_the_job(lost):
    def serve(shard):
        raise RuntimeError("can't start new thread")

    lost.slots.serve = serve
    lost.slots.ranks.release()
    lost.begin()
    lost.mailbox.wait_until(lambda: lost.failures)
    assert "new thread" in str(lost.failures[0])


def test_calls_to_the_leader_end_with_a_job_that_is_cancelled_while_there_is_none(lost):
    failover = lost.begin()
    lost.mailbox.end(JobCancelled("enough"))
    with pytest.raises(ServerUnreachable):
        failover.shards.save(None, None)
