"""Machines on which shards are placed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.placement import machine_of, spread_over_machines
from nfdt.jobserver.pool_slot import PoolSlot


def slots(hosts: str) -> list[PoolSlot]:
    return [PoolSlot(pb.SlotHello(name=f"{host}{i}", host=host, boot_id="same")) for i, host in enumerate(hosts)]


def is_here(hello: pb.SlotHello) -> bool:
    return hello.host == "s"


def order(hosts: str) -> str:
    return "".join(slot.hello.host for slot in spread_over_machines(slots(hosts), is_here))


@pytest.mark.parametrize(
    ("hosts", "placed"),
    [("aabb", "abab"), ("sab", "abs"), ("ssaab", "abass"), ("aaab", "abaa"), ("ss", "ss"), ("", "")],
)
def test_each_machine_gets_a_shard_before_one_gets_two_and_the_servers_is_last(hosts, placed):
    assert order(hosts) == placed


@given(st.text("abcs", max_size=12))
def test_every_slot_is_placed_once_and_machines_are_even(hosts):
    placed = spread_over_machines(found := slots(hosts), is_here)
    assert sorted(slot.name for slot in placed) == sorted(slot.name for slot in found)
    for count in range(len(placed)):
        first = [machine_of(slot.hello) for slot in placed[:count] if not is_here(slot.hello)]
        rest = {machine_of(slot.hello) for slot in placed[count:] if not is_here(slot.hello)}
        used = {machine: first.count(machine) for machine in {*first, *rest}}
        assert max(used.values(), default=0) - min((used[m] for m in rest), default=max(used.values(), default=0)) <= 1


def test_machines_that_share_a_kernel_differ_by_their_names():
    assert machine_of(pb.SlotHello(boot_id="same", host="a")) != machine_of(pb.SlotHello(boot_id="same", host="b"))
