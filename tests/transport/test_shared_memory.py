"""Memory shared with a shard of the same machine: who may offer what, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from nfdt.core.arrays import ParameterLayout
from nfdt.core.errors import JobCancelled, ServerUnreachable
from nfdt.core.machine import boot_id
from nfdt.core.program.state import State
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, OFFER, PULL, PUSH, WEIGHTS, Frame
from nfdt.shard.servicer import start_shard
from nfdt.transport import shared_memory
from nfdt.transport.stream import StreamClient
from tests.raw_stream import encode
from tests.shard_cluster import LAYOUT, Reference, gradients, rule_spec, start_weights
from tests.transport.test_stream import TOKEN, Relay, exchange

AREA = LAYOUT.size * 4
NO_LINK = os.strerror(errno.ELOOP)
NAME = shared_memory.PREFIX + "0123456789abcdef" * 2
SOURCE = Path(__file__).parents[2]

WORKER = """
import sys
from nfdt.core.arrays import ParameterLayout
from nfdt.transport.stream import StreamClient
import numpy as np
address, size = sys.argv[1], int(sys.argv[2])
client = StreamClient([address], ParameterLayout.of([("w", (size,))]), "w", "job-token", timeout_s=20)
client.pull()
client.push(np.ones(size, np.float32), samples=1)
print("pushed", flush=True)
sys.stdin.read()
"""

SHARD = """
import sys
from tests.transport.test_shared_memory import serve
print(serve().address, flush=True)
sys.stdin.read()
"""


def serve():
    reference = Reference(keras.optimizers.SGD(0.1))
    state = State(start_weights(), reference.state)
    return start_shard(reference.manifest(), state, rule_spec("plain"), 0, 1, workers=2, token=TOKEN)


@pytest.fixture(scope="module")
def shard():
    running = serve()
    yield running
    running.stop(0)


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    return tmp_path


def connect(address, worker="w", layout=LAYOUT, **options):
    return contextlib.closing(StreamClient([address], layout, worker, TOKEN, timeout_s=20, **options))


@contextlib.contextmanager
def process(code, *args):
    """A Python process of its own, and the first line it prints; killed with SIGKILL at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", code, *map(str, args)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, cwd=SOURCE, text=True) as started:
        try:
            assert started.stdout
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def mapped(pid="self"):
    """The names of segments that a process has mapped, as the system tells; unlinked ones too."""
    return set(re.findall(r"/dev/shm/(nfdt-[0-9a-f]{32})", Path(f"/proc/{pid}/maps").read_text()))


def left(names):
    return [name for name in names if (Path("/dev/shm") / name).exists()]


def test_a_worker_on_the_same_machine_shares_memory_by_itself(shard, directory):
    with connect(shard.address) as client:
        weights = client.pull().weights
        assert list(directory.iterdir()) == []
        answer = client.push(gradients(1)[0], samples=1)
        assert answer.weights is not None
        assert np.shares_memory(answer.weights, weights)
        assert not answer.weights.flags.writeable


def test_both_areas_suit_tensors(directory):
    segment = shared_memory.Offer(AREA, pairs=2).segment
    assert [a.ctypes.data % 64 for a in (*segment.gradients, *segment.replies)] == [0] * 4
    assert [a.nbytes for a in (*segment.gradients, *segment.replies)] == [AREA] * 4


def test_weights_outlive_their_client(shard):
    with connect(shard.address) as client:
        weights = client.pull().weights
        copy = weights.copy()
    del client
    assert np.array_equal(weights, copy)


def test_a_file_is_private_to_its_user(directory):
    offer = shared_memory.Offer(AREA)
    assert (directory / offer.name).stat().st_mode & 0o777 == 0o600
    assert (directory / offer.name).stat().st_size == shared_memory.segment_bytes(AREA)
    offer.withdraw()
    assert list(directory.iterdir()) == []


def test_no_room_to_share_leaves_the_bytes_on_the_stream(shard, directory, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with connect(shard.address) as client:
        client.pull()
        assert client.pull().weights.flags.writeable  # shared memory is read-only here
    assert list(directory.iterdir()) == []


def test_a_declined_offer_leaves_the_bytes_on_the_stream(shard, directory, monkeypatch):
    monkeypatch.setattr(shared_memory.Offer, "frame", lambda self, worker: Frame(kind=OFFER, worker=worker))
    with connect(shard.address, "declined") as client:
        first = client.pull().weights.copy()
        g = gradients(1)[0]
        answer = client.push(g, samples=1)
        np.testing.assert_allclose(answer.weights, first - 0.1 * g, rtol=1e-5, atol=1e-6)
        assert answer.weights.flags.writeable
    assert list(directory.iterdir()) == []


def test_another_model_size_is_declined_and_told_on_the_stream(shard, directory):
    with connect(shard.address, layout=ParameterLayout.of([("w", (5,))])) as client:
        with pytest.raises(Exception, match="expected 20 bytes of weights"):
            client.pull()
        assert list(directory.iterdir()) == []


def test_a_shard_that_is_closed_before_it_answers_leaves_no_name(shard, directory):
    relay = Relay(shard.address)
    relay.silent = True
    with connect(relay.address) as client:
        relay.on_request = client.close
        with pytest.raises((JobCancelled, ServerUnreachable)):
            client.pull()
    assert list(directory.iterdir()) == []
    relay.stop()


def test_a_new_stream_gets_memory_of_its_own(shard, directory):
    relay = Relay(shard.address)
    with connect(relay.address, "again") as client:
        first = client.pull().weights
        before = first.copy()
        relay.lose_answers_to = {2}
        g = gradients(1)[0]
        answer = client.push(g, samples=1)
        np.testing.assert_allclose(answer.weights, before - 0.1 * g, rtol=1e-5, atol=1e-6)
        assert not answer.applied
        assert not np.shares_memory(first, answer.weights)
        assert np.shares_memory(client.pull().weights, answer.weights)
    assert list(directory.iterdir()) == []
    relay.stop()


# -- what a shard refuses to map


def offer(**changes):
    fields = {"kind": OFFER, "worker": "v", "segment": NAME, "boot_id": boot_id(), "total_bytes": AREA, **changes}
    return Frame(**fields)


def make_file(directory, size=None, mode=0o600):
    path = directory / NAME
    path.write_bytes(bytes(shared_memory.segment_bytes(AREA) if size is None else size))
    path.chmod(mode)
    return path


def make_link(directory):
    make_file(directory).rename(directory / "target")
    (directory / NAME).symlink_to(directory / "target")


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (make_file, {"boot_id": "elsewhere"}, "another machine"),
        (make_file, {"segment": f"../{NAME}"}, "expected a name"),
        (make_file, {"segment": f"/etc/{NAME}"}, "expected a name"),
        (make_file, {"segment": NAME + "\n"}, "expected a name"),
        (make_file, {"segment": ""}, "expected a name"),
        (make_file, {"total_bytes": AREA + 4}, f"expected {AREA} bytes"),
        (lambda directory: None, {}, "No such file"),
        (make_link, {}, NO_LINK),
        (lambda directory: (directory / NAME).mkdir(), {}, "directory"),
        (lambda directory: os.mkfifo(directory / NAME, 0o600), {}, "expected a regular file"),
        (lambda directory: make_file(directory, size=4096), {}, "4096 bytes"),
        (lambda directory: make_file(directory, mode=0o644), {}, "mode -rw-r--r--"),
    ],
    ids="boot_id path absolute newline empty size missing link directory fifo short mode".split(),
)
def test_a_wrong_offer_is_declined_and_the_stream_goes_on(shard, directory, make, changes, message):
    make(directory)
    frames = [offer(**changes), Frame(kind=PULL, sequence=1)]
    declined, weights = exchange(shard.address, [encode(f) for f in frames])
    assert (declined.kind, declined.applied, declined.sequence) == (ACKNOWLEDGE, False, 0)
    assert message in declined.error
    assert (weights.kind, weights.shared, weights.total_bytes) == (WEIGHTS, False, AREA)


def test_a_file_of_another_user_is_declined(directory, monkeypatch):
    make_file(directory)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(shared_memory.Refused, match="regular file of user"):
        shared_memory.accept(offer(), AREA)


def test_a_good_offer_is_mapped_and_loses_its_name(shard, directory):
    make_file(directory)
    frames = [offer(), Frame(kind=PULL, sequence=1)]
    accepted, weights = exchange(shard.address, [encode(f) for f in frames])
    assert (accepted.kind, accepted.applied) == (ACKNOWLEDGE, True)
    assert weights.shared
    assert list(directory.iterdir()) == []


def test_a_push_through_memory_that_nobody_offered_is_an_error(shard):
    frames = [
        Frame(kind=PULL, sequence=1, worker="v"),
        Frame(kind=PUSH, sequence=2, total_bytes=AREA, shared=True, parts=1),
    ]
    *_, answer = exchange(shard.address, [encode(f) for f in frames])
    assert answer.kind == ERROR
    assert "no segment is mapped" in answer.error


def test_memory_is_offered_to_this_machine_only():
    assert shared_memory.is_this_machine("127.0.0.1")
    assert shared_memory.is_this_machine("::1")
    assert not shared_memory.is_this_machine("192.0.2.1")


# -- real processes in the real directory


def test_nothing_is_left_after_a_worker_is_killed(shard):
    with process(WORKER, shard.address, LAYOUT.size) as (worker, line):
        assert line == "pushed"
        names = mapped(worker.pid)
        assert names
        assert names <= mapped()
        worker.kill()
        worker.wait()
    assert left(names) == []
    with connect(shard.address, "another") as client:
        assert client.pull().versions[0] >= 1


def test_nothing_is_left_after_a_shard_is_killed():
    with process(SHARD) as (shard, address), connect(address) as client:
        client.pull()
        names = mapped(shard.pid)
        assert names
        assert names <= mapped()
        shard.kill()
        shard.wait()
        with pytest.raises(ServerUnreachable, match=address):
            client.push(gradients(1)[0], samples=1)
    assert left(names) == []
