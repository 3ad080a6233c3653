"""Memory shared with a shard of the same machine: permitted offers, and complete clean-up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.errors import ServerUnreachable
from nfdt.core.host.machine import Memory, boot_id
from nfdt.core.wire import passed_files, shared_memory
from nfdt.core.wire.job_token import worker_token
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, OFFER, PULL, PUSH, WEIGHTS, Frame
from nfdt.transport import link
from nfdt.transport.stream import StreamClient
from tests.support.raw_stream import encode
from tests.support.shard_cluster import LAYOUT, gradients
from tests.support.streams import TOKEN, FrameRelay, exchange, serve

AREA = LAYOUT.size * 4
NAME = passed_files.PREFIX + "0123456789abcdef" * 2
SOURCE = Path(__file__).parents[2]

WORKER = """
import sys
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.wire.job_token import worker_token
from nfdt.transport.stream import StreamClient
import numpy as np
address, size = sys.argv[1], int(sys.argv[2])
layout, token = ParameterLayout.of([("w", (size,))]), worker_token("job-token", "w")
client = StreamClient([address], layout, "w", token, timeout_s=20)
client.pull()
client.push(np.ones(size, np.float32), samples=1)
print("pushed", flush=True)
sys.stdin.read()
"""

SHARD = """
import sys
from tests.support.streams import serve
print(serve()[0].address, flush=True)
sys.stdin.read()
"""


OFFERS = """
import sys
from nfdt.core.wire.shared_memory import Offer
offer = Offer(2**20)
print(offer.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def shard():
    running = serve()[0]
    yield running
    running.stop(0)


def connect(address, worker="w", layout=LAYOUT, **options):
    return contextlib.closing(
        StreamClient([address], layout, worker, worker_token(TOKEN, worker), timeout_s=20, **options)
    )


@contextlib.contextmanager
def process(code, *args):
    """Start a Python process and yield it with the first line that it prints; it is killed with SIGKILL at the end."""
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
    """Return the segments that a process has mapped, by inode, from the system's files."""
    return set(re.findall(r"(\d+) +/memfd:nfdt", Path(f"/proc/{pid}/maps").read_text()))


def named():
    """Return the files in the directory of named segments, and the sockets at which segments are handed out."""
    sockets = re.findall(r"@(nfdt-[0-9a-f]{32})$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    return {*Path("/dev/shm").glob("nfdt-*"), *sockets}


@pytest.fixture
def nothing_named():
    """Check that before and after a test no segment has a name."""
    before = named()
    yield
    assert named() <= before


def test_a_worker_on_the_same_machine_shares_memory_by_itself(shard, nothing_named):
    with connect(shard.address) as client:
        weights = client.pull().weights
        answer = client.push(gradients(1)[0], samples=1)
        assert answer.weights is not None
        assert np.shares_memory(answer.weights, weights)
        assert not answer.weights.flags.writeable


def test_a_gradient_in_pieces_is_joined_in_shared_memory(shard, monkeypatch):
    seen = []

    def is_same(area, payload):
        seen.append(is_same_memory(area, payload))
        return seen[-1]

    is_same_memory = link._is_same_memory
    monkeypatch.setattr(link, "_is_same_memory", is_same)
    with connect(shard.address, "pieces") as client:
        before, g = client.pull().weights.copy(), gradients(1)[0]
        np.testing.assert_allclose(
            client.push(Pieces.flat(np.array_split(g, 3)), samples=1).weights, before - 0.1 * g, rtol=1e-5, atol=1e-6
        )
        client.push(g, samples=1)
    assert seen == [True, False]


def test_both_areas_suit_tensors():
    offer = shared_memory.Offer(AREA, pairs=2)
    offer.withdraw()
    segment = offer.segment
    assert [a.ctypes.data % 64 for a in (*segment.gradients, *segment.replies)] == [0] * 4
    assert [a.nbytes for a in (*segment.gradients, *segment.replies)] == [AREA] * 4


def test_weights_outlive_their_client(shard):
    with connect(shard.address) as client:
        weights = client.pull().weights
        copy = weights.copy()
    del client
    assert np.array_equal(weights, copy)


def test_an_offer_is_handed_to_processes_of_its_user_only(monkeypatch):
    offer = shared_memory.Offer(AREA)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # for the serving side and the requesting one
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(60)
        peer.connect(f"\0{offer.name}")
        assert socket.recv_fds(peer, 1, 1)[:2] == (b"", [])  # it is closed
    monkeypatch.undo()
    assert shared_memory.accept(offer.frame("w"), AREA).gradients[0].nbytes == AREA
    offer.withdraw()


def test_an_offer_that_is_withdrawn_is_handed_out_no_more():
    offer = shared_memory.Offer(AREA)
    offer.withdraw()
    with pytest.raises(shared_memory.Refused, match="Connection refused"):
        shared_memory.accept(offer.frame("w"), AREA)


def test_a_segment_that_takes_most_of_the_free_memory_is_not_made(monkeypatch):
    monkeypatch.setattr(shared_memory, "memory", lambda: Memory(2**40, 3 * AREA))
    with pytest.raises(OSError, match="of the memory that is free"):
        shared_memory.Offer(AREA)


def test_no_room_to_share_leaves_the_bytes_on_the_stream(shard, nothing_named, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with connect(shard.address) as client:
        client.pull()
        assert client.pull().weights.flags.writeable  # shared memory is read-only here


def test_a_declined_offer_leaves_the_bytes_on_the_stream(shard, nothing_named, monkeypatch):
    monkeypatch.setattr(shared_memory.Offer, "frame", lambda self, worker: Frame(kind=OFFER, worker=worker))
    with connect(shard.address, "declined") as client:
        first = client.pull().weights.copy()
        g = gradients(1)[0]
        answer = client.push(g, samples=1)
        np.testing.assert_allclose(answer.weights, first - 0.1 * g, rtol=1e-5, atol=1e-6)
        assert answer.weights.flags.writeable


def test_another_model_size_is_declined_and_reported_on_the_stream(shard, nothing_named):
    with connect(shard.address, layout=ParameterLayout.of([("w", (5,))])) as client:
        with pytest.raises(Exception, match="expected 20 bytes of weights"):
            client.pull()


def test_a_shard_that_is_closed_before_it_answers_leaves_no_name(shard, nothing_named):
    relay = FrameRelay(shard.address, "again")
    relay.silent = True
    with connect(relay.address) as client:
        relay.on_request = client.close
        with pytest.raises(ServerUnreachable):
            client.pull()
    relay.stop()


def test_a_new_stream_gets_memory_of_its_own(shard, nothing_named):
    relay = FrameRelay(shard.address, "again")
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
    relay.stop()


# -- what a shard refuses to map


def offer(**changes):
    fields = {"kind": OFFER, "worker": "w", "segment": NAME, "boot_id": boot_id(), "total_bytes": AREA, **changes}
    return Frame(**fields)


SIZE = shared_memory.segment_bytes(AREA)


def in_memory(size=SIZE, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL):
    file = os.memfd_create("nfdt", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return [file]


def on_disk():
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        return [os.dup(file.fileno())]


def copies(file):
    """Return the number of descriptors of this process for the same file."""
    found = 0
    for other in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of another thread
            found += os.path.samestat(os.stat(f"/proc/self/fd/{other}"), os.fstat(file))
    return found


@contextlib.contextmanager
def handing_out(make):
    """Start a process that hands out the result of ``make`` under ``NAME``."""
    files = make()

    def hand_out():
        peer, _ = listening.accept()
        with peer, contextlib.suppress(BrokenPipeError):  # it has declined
            socket.send_fds(peer, [b"."], files)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{NAME}")
        listening.listen()
        listening.settimeout(60)
        thread = threading.Thread(target=hand_out, daemon=True)
        thread.start()
        yield files
        thread.join()
    for file in files:
        os.close(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boot_id": "elsewhere"}, "another machine"),
        ({"segment": f"../{NAME}"}, "expected a name"),
        ({"segment": f"/etc/{NAME}"}, "expected a name"),
        ({"segment": NAME + "\n"}, "expected a name"),
        ({"segment": ""}, "expected a name"),
        ({"total_bytes": AREA + 4}, f"expected {AREA} bytes"),
        ({}, "Connection refused"),
    ],
    ids="boot_id path absolute newline empty size missing".split(),
)
def test_a_wrong_offer_is_declined_and_the_stream_goes_on(shard, changes, message):
    frames = [offer(**changes), Frame(kind=PULL, sequence=1)]
    declined, weights = exchange(shard.address, [encode(f) for f in frames])
    assert (declined.kind, declined.applied, declined.sequence) == (ACKNOWLEDGE, False, 0)
    assert message in declined.error
    assert (weights.kind, weights.shared, weights.total_bytes) == (WEIGHTS, False, AREA)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "expected a file"),
        (os.pipe, "expected a file in memory"),
        (on_disk, "not sealed"),
        (lambda: in_memory(4096), "4096 bytes"),
        (lambda: in_memory(seals=fcntl.F_SEAL_GROW), "not sealed"),
    ],
    ids="nothing pipe disk short shrinkable".split(),
)
def test_what_is_no_segment_is_declined_and_not_kept(make, message):
    with handing_out(make) as files:
        with pytest.raises(shared_memory.Refused, match=message):
            shared_memory.accept(offer(), AREA)
        assert all(copies(file) == len(files) for file in files)  # a pipe's ends are one file


def test_a_segment_of_another_user_is_declined(monkeypatch):
    with handing_out(in_memory):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(shared_memory.Refused, match="expected one of user"):
            shared_memory.accept(offer(), AREA)


def test_a_process_that_hands_out_nothing_is_waited_for_no_longer_than_a_while(monkeypatch):
    monkeypatch.setattr(passed_files, "FETCH_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{NAME}")
        silent.listen()
        with pytest.raises(shared_memory.Refused, match="timed out"):
            shared_memory.accept(offer(), AREA)


def test_a_good_offer_is_mapped(shard):
    with handing_out(in_memory):
        frames = [offer(), Frame(kind=PULL, sequence=1)]
        accepted, weights = exchange(shard.address, [encode(f) for f in frames])
    assert (accepted.kind, accepted.applied) == (ACKNOWLEDGE, True)
    assert weights.shared


def test_a_push_through_memory_that_was_not_offered_is_an_error(shard):
    frames = [
        Frame(kind=PULL, sequence=1, worker="w"),
        Frame(kind=PUSH, sequence=2, total_bytes=AREA, shared=True, parts=1),
    ]
    *_, answer = exchange(shard.address, [encode(f) for f in frames])
    assert answer.kind == ERROR
    assert "no segment is mapped" in answer.error


def test_memory_is_offered_to_this_machine_only():
    assert shared_memory.is_this_machine("127.0.0.1")
    assert shared_memory.is_this_machine("::1")
    assert not shared_memory.is_this_machine("192.0.2.1")


# -- real processes


def test_nothing_is_left_after_a_worker_is_killed(shard, nothing_named):
    with process(WORKER, shard.address, LAYOUT.size) as (worker, line):
        assert line == "pushed"
        segments = mapped(worker.pid)
        assert segments
        assert segments <= mapped()
        worker.kill()
        worker.wait()
    with connect(shard.address, "another") as client:
        assert client.pull().versions[0] >= 1


def test_nothing_is_left_after_a_worker_is_killed_before_the_shard_has_its_segment(nothing_named):
    with process(OFFERS) as (worker, name):
        assert name in named()
        worker.kill()
        worker.wait()
        assert name not in named()


def test_nothing_is_left_after_a_shard_is_killed(nothing_named):
    with process(SHARD) as (shard, address), connect(address) as client:
        client.pull()
        segments = mapped(shard.pid)
        assert segments
        assert segments <= mapped()
        shard.kill()
        shard.wait()
        with pytest.raises(ServerUnreachable, match=address):
            client.push(gradients(1)[0], samples=1)
