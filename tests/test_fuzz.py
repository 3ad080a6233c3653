"""Made-up bytes and calls for real processes, for some seconds; ``scripts/fuzz`` takes longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import h11
import pytest

from nfdt.core.wire import workers_pb2
from nfdt.core.wire.frame_stream import payload_bytes
from nfdt.core.wire.shards_pb2 import Frame
from tests.support.fuzz import made_up
from tests.support.scripts import DEADLINE_S, environment

ROOT = Path(__file__).parents[1]


def test_made_up_messages_are_read_back_and_repeat_with_their_seed():
    kind = workers_pb2.SlotMessage.DESCRIPTOR
    first, second = ([made_up.message(kind, random) for _ in range(100)] for random in (Random(3), Random(3)))
    assert [one.SerializeToString() for one in first] == [one.SerializeToString() for one in second]
    assert {one.WhichOneof("message") for one in first} > {"hello", "ready", "failed"}
    sent = [one.SerializeToString() for one in first]
    assert [workers_pb2.SlotMessage.FromString(data).SerializeToString() for data in sent] == sent


def test_made_up_requests_repeat_with_their_seed_and_about_half_of_them_are_valid():
    first, second = (
        [made_up.request(random, "job-1", "token") for _ in range(300)] for random in (Random(3), Random(3))
    )
    assert first == second
    valid = sum(_begins_well(data) for data in first)
    assert 60 < valid < 240


def _begins_well(data: bytes) -> bool:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        return isinstance(connection.next_event(), h11.Request)
    except h11.RemoteProtocolError:
        return False


def test_a_made_up_stream_has_valid_frames_in_order_and_few_that_are_spoilt(monkeypatch):
    monkeypatch.setattr(made_up, "SPOILT", 0.0)
    data, sequence = made_up.frames(Random(1), size=8, count=50), 0
    while data:
        size = int.from_bytes(data[:4], "little")
        header = Frame.FromString(data[4 : 4 + size])
        sequence += 1
        assert header.sequence == sequence
        data = data[4 + size + payload_bytes(header) :]
    assert sequence == 50
    monkeypatch.undo()
    assert made_up.frames(Random(1), count=20_000) == made_up.frames(Random(1), count=20_000)


@pytest.mark.long
@pytest.mark.timeout(4 * DEADLINE_S)
def test_a_server_and_a_shard_survive_made_up_traffic():
    command = [sys.executable, "-m", "tests.support.fuzz", "--minutes", "0.3", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "frames that a shard answered" in done.stdout
