"""Choice of worker slots for ranks, and slots that are reserved for a job."""

from __future__ import annotations

import pytest

from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.placement import free_seats, place_groups, returning_slots
from nfdt.jobserver.pool_slot import PoolSlot, SlotUser
from nfdt.jobserver.slot_pool import SlotPool


def slots(machines: str) -> list[PoolSlot]:
    """Return a slot on the machine of each letter."""
    return [PoolSlot(pb.SlotHello(name=f"{m}{i}", host=m, boot_id="boot")) for i, m in enumerate(machines)]


def names(chosen: dict[int, PoolSlot]) -> dict[int, str]:
    return {member: slot.hello.host for member, slot in sorted(chosen.items())}


def machine(letter: str) -> tuple[str, str]:
    return "boot", letter


def test_a_group_takes_the_smallest_machine_that_suffices():
    assert names(place_groups(slots("aaabbc"), [(0, 1)], together=True)) == {0: "b", 1: "b"}


def test_a_large_group_takes_few_machines_in_order_or_is_not_placed():
    assert names(place_groups(slots("abbbcc"), [range(5)], together=False)) == {0: "b", 1: "b", 2: "b", 3: "c", 4: "c"}
    assert place_groups(slots("abbbcc"), [range(5)], together=True) == {}
    assert place_groups(slots("abbbcc"), [range(7)], together=False) == {}


def test_groups_share_the_machines():
    placed = names(place_groups(slots("aabbb"), [(3, 4), (0, 1, 2)], together=True))
    assert placed == {0: "b", 1: "b", 2: "b", 3: "a", 4: "a"}


def test_members_return_to_their_machines():
    machines = {0: machine("a"), 1: machine("b"), 2: machine("a")}
    found = returning_slots(slots("abab"), (0, 1, 2), machines, elsewhere=False)
    assert [slot.name for slot in found] == ["a0", "b1", "a2"]


@pytest.mark.parametrize(("elsewhere", "expected"), [(True, ["a0", "c1"]), (False, [])])
def test_a_member_without_its_machine_may_go_elsewhere(elsewhere, expected):
    machines = {0: machine("a"), 1: machine("b")}
    found = returning_slots(slots("ac"), (0, 1), machines, elsewhere=elsewhere)
    assert [slot.name for slot in found] == expected


@pytest.mark.parametrize(("elsewhere", "expected"), [(True, {0: "a", 1: "c"}), (False, {0: "a"})])
def test_those_members_have_a_seat_for_which_there_is_a_slot(elsewhere, expected):
    machines = {0: machine("a"), 1: machine("b"), 2: machine("b")}
    assert names(free_seats(slots("ac"), (0, 1, 2), machines, elsewhere=elsewhere)) == expected


def take(pool: SlotPool, job: str, count: int) -> int:
    return len(pool.assign(SlotUser(job), "worker", count))


def pool_of(count: int) -> tuple[SlotPool, list[PoolSlot]]:
    pool = SlotPool()
    return pool, [pool.join(pb.SlotHello(name=f"slot-{i}", role="worker")).slot for i in range(count)]


def test_reserved_slots_go_to_no_other_job():
    pool, _ = pool_of(3)
    assert len(pool.reserve("one", lambda free, most: list(free)[:2])) == 2
    assert pool.attending("worker") == (3, 1)
    assert pool.attending("worker", job_id="one") == (3, 3)
    assert take(pool, "two", 3) == 1
    assert take(pool, "one", 2) == 2


def test_a_slot_that_replaces_one_of_the_reserved_goes_to_its_job():
    pool, joined = pool_of(2)
    pool.reserve("one", lambda free, most: list(free))
    assert take(pool, "one", 2) == 2
    pool.leave(joined[0])
    pool.join(pb.SlotHello(name="fresh", role="worker"))
    assert take(pool, "two", 1) == 0
    pool.unreserve("one")
    assert take(pool, "two", 1) == 1


def test_a_job_that_cannot_be_placed_reserves_nothing():
    pool, _ = pool_of(2)
    assert pool.reserve("one", lambda free, most: []) == []
    assert take(pool, "two", 2) == 2


def test_free_slots_that_have_served_a_job_are_dismissed():
    pool, joined = pool_of(2)
    joined[0].send(pb.Assignment(worker=pb.WorkerAssignment(job_id="old")))
    pool.evict_used()
    assert [slot.dismissed for slot in joined] == [True, False]
