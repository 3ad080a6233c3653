"""Made-up bytes and calls for real processes, for some seconds; ``scripts/fuzz`` takes longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from nfdt.core.wire import workers_pb2
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


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_server_and_a_shard_survive_made_up_traffic():
    command = [sys.executable, "-m", "tests.support.fuzz", "--minutes", "0.3", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "frames on streams of a worker" in done.stdout
