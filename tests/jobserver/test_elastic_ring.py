"""When the ranks of an elastic ring in slots leave their world, and which of them are there for the next one."""

from __future__ import annotations

import threading
import time

import pytest

from nfdt.core.specs.horovod_options import RingElastic
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver import elastic_ring
from nfdt.jobserver.elastic_ring import ElasticSlotRing
from nfdt.jobserver.pool_slot import PoolSlot
from nfdt.launch.horovod_command import RingShape

JOINED = pb.SlotMessage(ready=pb.SlotReady(job_id="job"))
LEFT = pb.SlotMessage(ready=pb.SlotReady(job_id="job", left=True))


class Ring(ElasticSlotRing):
    """Ring of three slots whose ends are known at once, and whose failures are kept."""

    def __init__(self, **elastic: int) -> None:
        self.failures: list[object] = []
        shape = RingShape(3, elastic=RingElastic(**{"min_workers": 2, **elastic}))
        self.asks = threading.Semaphore(0)
        after = dict(end_of=lambda hello: "it was killed", failed=lambda *end: self.failures.append(end))
        super().__init__("ring", shape, job_log=None, **after)
        self.slots = tuple(PoolSlot(pb.SlotHello(name=f"slot-{i}", host=f"node{i}"), job_id="job") for i in range(3))
        self.begin_world()

    def tell(self, message: pb.SlotMessage, *ranks: int) -> None:
        for rank in ranks:
            self.receive(self.slots[rank], "ready", message)

    def lose(self, rank: int) -> None:
        self.receive(self.slots[rank], "lost", None)
        assert self.await_change(lambda: False) == "lost"

    def _ask_to_leave(self, **how: bool) -> None:
        super()._ask_to_leave(**how)
        self.asks.release()

    def asked(self, rank: int) -> list[bool]:
        """Return whether a rank was asked to leave at a commit, for each time that it was asked."""
        sent = list(self.slots[rank].to_send._kept)
        return [one.leave_world.at_commit for one in sent if one.HasField("leave_world")]


@pytest.fixture
def ring(monkeypatch):
    monkeypatch.setattr(elastic_ring, "LOOK_S", 0.01)
    ring = Ring()
    ring.tell(JOINED, 0, 1, 2)
    ring.await_ranks()
    return ring


def test_the_others_leave_at_once_when_a_rank_is_lost_and_are_there_for_the_next_world(ring):
    ring.lose(1)
    ring.tell(LEFT, 0, 2)
    ring.dissolve("lost")
    assert ring.lost == {ring.slots[1]: "it was killed"}
    assert ring.present == [ring.slots[0], ring.slots[2]]
    assert ring.lacks == 1
    assert not ring.failures


def test_ranks_that_have_not_left_are_asked_once(ring):
    ring.lose(1)
    ring.tell(LEFT, 2)
    dissolving = threading.Thread(target=ring.dissolve, args=("lost",), daemon=True)
    dissolving.start()
    assert ring.asks.acquire(timeout=30)
    ring.tell(LEFT, 0)
    dissolving.join(30)
    assert not dissolving.is_alive()
    assert ring.asked(0) == [False]
    assert ring.asked(1) == ring.asked(2) == []


def test_a_rank_that_loses_the_others_by_itself_ends_the_world(ring):
    ring.tell(LEFT, 2)
    assert ring.await_change(lambda: True) == "lost"


def test_a_free_slot_lets_a_smaller_ring_grow_at_a_commit(ring):
    ring.lose(2)
    ring.tell(LEFT, 0, 1)
    ring.dissolve("lost")
    ring.forget(ring.lost)
    ring.slots = ring.slots[:2]
    ring.begin_world()
    ring.tell(JOINED, 0, 1)
    ring.await_ranks()
    assert not ring.may_grow  # soon after a loss
    ring._grows_at = time.monotonic()
    assert ring.await_change(lambda: True) == "grow"
    growing = threading.Thread(target=ring.dissolve, args=("grow",), daemon=True)
    growing.start()
    assert ring.asks.acquire(timeout=30)
    ring.tell(LEFT, 0, 1)
    growing.join(30)
    assert ring.asked(0) == ring.asked(1) == [True]
    assert (ring.changes, ring.lost) == (2, {})


def test_a_loss_while_the_ring_grows_lets_the_others_leave_at_once(ring):
    growing = threading.Thread(target=ring.dissolve, args=("grow",), daemon=True)
    growing.start()
    ring.lose(0)
    assert ring.asks.acquire(timeout=30)
    assert ring.asks.acquire(timeout=30)
    assert ring.asked(1) == [True, False]
    ring.tell(LEFT, 1, 2)
    growing.join(30)
    assert ring.present == [ring.slots[1], ring.slots[2]]


@pytest.mark.parametrize("given", ["left", "joined"])
def test_a_rank_that_takes_too_long_is_lost(ring, monkeypatch, given):
    monkeypatch.setattr(elastic_ring, "FORM_S", 0.05)
    ring.begin_world()
    if given == "joined":
        ring.tell(JOINED, 0, 1)
        ring.await_ranks()
    else:
        ring.tell(LEFT, 0, 1)
        ring.dissolve("lost")
    assert list(ring.lost) == [ring.slots[2]]
    assert "within 0 s" in ring.lost[ring.slots[2]]


def test_an_exception_of_the_jobs_code_ends_the_ring_as_ever(ring):
    failed = pb.SlotFailed(job_id="job", exception_type="ValueError", message="no", failed_in="rank-1")
    ring.receive(ring.slots[1], "failed", pb.SlotMessage(failed=failed))
    assert "ValueError: no" in str(ring.failure)
    assert ring.await_change(lambda: False) is None
    assert len(ring.failures) == 1
