"""Links that lose, corrupt or delay packets, and machines that lose their power."""

from __future__ import annotations

from random import Random

from tests.support.eventually import eventually
from tests.support.machine_programs import Conversation, transfer_mbit
from tests.support.machines import Machine
from tests.support.machines.link_emulator import HEADER, IPV4, LinkDamage, damaged

FRAME = bytes(12) + IPV4 + bytes(100)
MANY = 1000
SIZE = 2_000_000


def counter(machine: Machine, name: str) -> int:
    return int(machine.run(["nstat", "--zeros", "--ignore", "--noupdate", name]).stdout.splitlines()[1].split()[1])


def differing_bits(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_frames_are_lost_with_their_probability():
    random = Random(1)
    arrived = [damaged(FRAME, LinkDamage(loss=0.2), random) for _ in range(MANY)]
    assert set(arrived) == {FRAME, None}
    assert 150 < arrived.count(None) < 250


def test_one_bit_behind_the_addresses_is_flipped():
    random = Random(1)
    arrived = [damaged(FRAME, LinkDamage(corruption=0.5), random) for _ in range(MANY)]
    assert {frame[:HEADER] for frame in arrived} == {FRAME[:HEADER]}
    assert {differing_bits(frame, FRAME) for frame in arrived} == {0, 1}
    assert 400 < arrived.count(FRAME) < 600


def test_frames_without_a_checksum_are_not_corrupted():
    frame = FRAME.replace(IPV4, b"\x08\x06")
    assert damaged(frame, LinkDamage(corruption=1.0), Random(1)) == frame


def test_what_a_link_loses_is_sent_again(machines):
    one, two = machines(2)
    two.damage(LinkDamage(loss=0.05))
    assert transfer_mbit(one, two, SIZE) > 0
    assert transfer_mbit(two, one, SIZE) > 0
    assert min(counter(machine, "TcpRetransSegs") for machine in (one, two)) > 0


def test_what_a_link_corrupts_is_detected_and_sent_again(machines):
    one, two = machines(2)
    one.damage(LinkDamage(corruption=0.05))
    assert transfer_mbit(one, two, SIZE) > 0
    assert transfer_mbit(two, one, SIZE) > 0
    assert min(counter(machine, "TcpInCsumErrors") for machine in (one, two)) > 0


def test_connections_outlive_a_damaged_link(machines):
    one, two = machines(2)
    talk = Conversation(one, two)
    for words in ("before", "meanwhile", "after"):
        if words == "meanwhile":
            two.damage(LinkDamage(loss=0.1, corruption=0.1, delay_ms=20))
        talk.say(words)
        assert talk.answer() == words
        two.repair()


def test_a_delay_counts_in_each_direction(machines):
    one, two = machines(2)
    talk = Conversation(one, two)
    talk.say("fast")
    assert talk.answer() == "fast"
    two.damage(LinkDamage(delay_ms=400))
    talk.say("slow")
    assert talk.answer(0.7) == ""
    assert talk.answer() == "slow"


def test_a_machine_that_lost_its_power_has_forgotten_its_connections(machines):
    lost, other = machines(2)
    talk = Conversation(other, lost)
    talk.say("hello")
    assert talk.answer() == "hello"
    lost.lose_power()
    assert lost.processes() == []
    assert lost.run(["ss", "--tcp", "--numeric", "--no-header"]).stdout == ""
    assert talk.client.poll() is None, "nothing tells the other side"
    lost.mend()
    talk.say("hello again")
    assert eventually(lambda: talk.client.poll() is not None)
    assert "ConnectionResetError" in talk.client.error_output()
    anew = Conversation(other, lost)
    anew.say("hello anew")
    assert anew.answer() == "hello anew"
