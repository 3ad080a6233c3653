"""The ranks of the next world of an elastic ring in slots: those that are left, and free slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nfdt.core.specs.horovod_options import RingElastic
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver import slot_rings
from nfdt.jobserver.elastic_ring import ElasticSlotRing
from nfdt.jobserver.pool_slot import SlotUser
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.jobserver.slot_rings import SlotRings
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.world_store import WorldStores


class Cluster:
    """A job whose ring of two ranks has lost one of them, and free slots on the machines of these letters."""

    def __init__(self, free: str, *, spans: bool, **elastic: int) -> None:
        self.pool = SlotPool()
        server = SimpleNamespace(
            pool=self.pool, insecure_allreduce=spans, worlds=WorldStores(), end_of=lambda _: "gone"
        )
        user = SlotUser("job")
        slots = SimpleNamespace(
            server=server,
            job_id="job",
            spec=SimpleNamespace(cluster=SimpleNamespace(workers=2)),
            accepts_rank=lambda slot: True,
            evict_other_sessions=lambda: None,
            assign_ranks=lambda choose, listener: self.pool.assign_chosen(user, "worker", choose),
        )
        self.rings = SlotRings(slots, None, lambda error: None)
        shape = RingShape(2, elastic=RingElastic(**elastic))
        end = dict(end_of=server.end_of, failed=lambda ring, error: None, job_log=None)
        self.ring = ElasticSlotRing("ring", shape, **end)
        survivor, lost = (self.join("a") for _ in range(2))
        self.ring.slots = (survivor, lost)
        for slot in self.ring.slots:
            slot.job_id, slot.used = "job", True
        self.ring.receive(lost, "lost", None)
        assert self.ring.await_change(lambda: False) == "lost"
        self.pool.leave(lost)
        for machine in free:
            self.join(machine)

    def join(self, machine: str):
        number = len(self.pool.plain_slots("worker"))
        return self.pool.join(pb.SlotHello(name=f"{machine}{number}", role="worker", host=machine)).slot

    def next_world(self) -> list[str]:
        return [slot.name for slot in self.rings._await_more(self.ring, "a1 is lost.")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(slot_rings, "TAKE_POLL_S", 0.01)


def test_the_survivor_comes_first_and_a_free_slot_of_any_machine_follows():
    assert Cluster("bc", spans=True, min_workers=1).next_world() == ["a0", "b1"]


def test_a_ring_may_grow_up_to_its_limit():
    assert Cluster("bcd", spans=True, min_workers=1, max_workers=3).next_world() == ["a0", "b1", "c2"]


def test_a_ring_that_may_not_span_machines_takes_slots_of_its_own():
    assert Cluster("ba", spans=False, min_workers=1).next_world() == ["a0", "a2"]
    assert Cluster("bc", spans=False, min_workers=1).next_world() == ["a0"]


def test_with_fewer_ranks_than_asked_for_the_ring_waits_and_then_fails(monkeypatch):
    cluster = Cluster("", spans=True, min_workers=2, elastic_timeout_s=1)
    monkeypatch.setattr(slot_rings.time, "monotonic", iter(range(100)).__next__)
    assert cluster.next_world() == []
    assert "1 ranks are there, fewer than 2, for longer than elastic_timeout_s=1. a1 is lost" in cluster.ring.failure


def test_a_ring_whose_ranks_change_too_often_gives_up():
    cluster = Cluster("b", spans=True, min_workers=1, reset_limit=1)
    cluster.ring.begin_world()
    assert cluster.next_world() == []
    assert "more than reset_limit=1 times" in cluster.ring.failure


def test_a_ring_without_a_survivor_has_no_state_to_go_on_from():
    cluster = Cluster("b", spans=True, min_workers=1)
    cluster.ring.receive(cluster.ring.slots[0], "finished", None)
    assert cluster.ring.await_change(lambda: False) == "lost"
    while len(cluster.ring.lost) < 2:
        cluster.pool.wait(0.01)
    assert cluster.next_world() == []
    assert "no rank is left that has its state. a1 is lost" in cluster.ring.failure
