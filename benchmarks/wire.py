"""Push a gradient and pull fresh weights, one worker, one shard, SGD with momentum: round trips per second."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import psutil

from benchmarks import embedding
from benchmarks.report import Report, Row, arguments
from nfdt.core.arrays import ParameterLayout
from nfdt.core.spec import resolve_algorithm
from nfdt.transport.choice import make_choice
from nfdt.transport.emulated_link import EmulatedLink
from nfdt.transport.stream import StreamClient

SEED = 1
TOKEN = "t" * 32  # the shard and its worker live as long as this program
SIZES = {"0.25M": 250_000, "2.5M": 2_500_000, "25M": 25_000_000}
RATE, MOMENTUM = 1e-4, 0.9
START_S = 60.0

RoundTrip = Callable[[], None]
Pace = Callable[[float], float]
"""Round trips per second, measured over so many seconds."""


def layout_of(size: int, variables: int = 1) -> ParameterLayout:
    """``size`` numbers in variables of equal size."""
    return ParameterLayout.of([(f"v{i}", (size // variables,)) for i in range(variables)])


def start(
    layout: ParameterLayout,
    algorithm: str,
    index: int = 0,
    shards: int = 1,
    workers: int = 1,
    codec: str = "identity",
) -> str:
    """Start a shard in this process; its address."""
    import keras

    from nfdt.core.program.state import State
    from nfdt.shard.servicer import start_shard

    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    scalar = {"shape": [], "variable": -1}
    velocities = [{"shape": slot.shape, "dtype": "float32", "variable": i} for i, slot in enumerate(layout.slots)]
    manifest = {
        "layout": layout.to_json(),
        "optimizer": keras.saving.serialize_keras_object(optimizer),
        "optimizer_variables": [{**scalar, "dtype": "int64"}, {**scalar, "dtype": "float32"}, *velocities],
        "elementwise": True,
        "constraints": [None] * len(layout.slots),
        "decay": [True] * len(layout.slots),
    }
    state = State(np.zeros(layout.size, np.float32))
    row = resolve_algorithm(algorithm, codec=codec)
    return start_shard(manifest, state, row, index, shards, workers=workers, token=TOKEN).address


def serve_shard(pipe: Connection, *shard: Any) -> None:
    """A shard, see :func:`start`; sends the bytes that it alone holds for every message, until the process is ended."""
    pipe.send(start(*shard))
    while True:
        pipe.recv()
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not in use
        pipe.send(psutil.Process().memory_full_info().uss)


def serve_shards(pipe: Connection, layout: ParameterLayout, jobs: list[tuple[str, str]]) -> None:
    """A shard for every (algorithm, codec), all in this process, until it is ended; only one is used at a time."""
    pipe.send([start(layout, algorithm, codec=codec) for algorithm, codec in jobs])
    pipe.recv()


def serve_tensorflow(pipe: Connection) -> None:
    """TensorFlow's own parameter server."""
    import tensorflow as tf

    server = tf.distribute.Server({"ps": ["127.0.0.1:0"]}, job_name="ps", task_index=0, protocol="grpc")
    pipe.send(server.target.removeprefix("grpc://"))
    pipe.recv()


def serve_bytes(pipe: Connection, size: int) -> None:
    """Receive ``size`` numbers over TCP, send as many back."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            buffer = memoryview(bytearray(4 * size))
            while receive(connection, buffer):
                connection.sendall(buffer)


def receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; False when the other side has closed."""
    got = 0
    while got < len(buffer):
        count = connection.recv_into(buffer[got:])
        if not count:
            return False
        got += count
    return True


class Running:
    """A process on its way, and the pipe to it."""

    def __init__(self, name: str, pipe: Connection) -> None:
        self._name, self.pipe = name, pipe

    def first(self) -> Any:
        """What it says first; waits for it."""
        if not self.pipe.poll(START_S):
            raise TimeoutError(f"{self._name}: expected it to serve within {START_S:g} s. Received: nothing.")
        return self.pipe.recv()


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[Running]:
    """A process of its own that runs ``target``, until the block ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield Running(target.__name__, ours)
    finally:
        process.kill()
        process.join(10)
        ours.close()


@contextmanager
def served(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """What ``target`` says first, from a process of its own, and the pipe to it."""
    with started(target, *arguments) as running:
        yield running.first(), running.pipe


@dataclass(frozen=True)
class Ours:
    """A worker of ours, which pushes and takes the reply; its link is emulated where ``mbit`` says how fast it is."""

    algorithm: str
    share_memory: bool
    codec: str = "identity"
    mbit: float | None = None

    @contextmanager
    def connect(self, address: str, name: str, size: int) -> Iterator[Pace]:
        """To a shard of this algorithm and codec, as worker ``name``."""
        gradient = np.random.default_rng(SEED).normal(0, 0.01, size).astype(np.float32)
        client = StreamClient(
            [address],
            layout_of(size),
            name,
            TOKEN,
            share_memory=self.share_memory,
            choice=make_choice(resolve_algorithm(self.algorithm, codec=self.codec), size),
            emulated=EmulatedLink(self.mbit, 0.0, threading.Event()) if self.mbit else None,
        )
        client.pull()
        try:
            yield partial(per_second, lambda: client.push(gradient, samples=1) and None)
        finally:
            client.close()


def push_to_tensorflow(pipe: Connection, address: str, size: int) -> None:
    """A worker of TensorFlow's parameter server: momentum there, then read the weights.

    In a process of its own, because a process that has been connected to a server waits for it ever after.
    """
    import tensorflow as tf

    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec({"ps": [address]}), job_name="client")
    with tf.device("/job:ps/task:0/device:CPU:0"):
        weights = tf.Variable(tf.zeros(size))
        velocity = tf.Variable(tf.zeros(size))
    values = np.random.default_rng(SEED).normal(0, 0.01, size).astype(np.float32)
    with tf.device("/job:client/task:0/device:CPU:0"):
        gradient = tf.constant(values)

    @tf.function
    def step(gradient: Any) -> Any:
        with tf.device("/job:ps/task:0/device:CPU:0"):
            moved = velocity.assign(MOMENTUM * velocity - RATE * gradient)
            fresh = weights.assign_add(moved).read_value()
        with tf.device("/job:client/task:0/device:CPU:0"):
            return tf.identity(fresh)

    pipe.send("ready")
    while True:
        pipe.send(per_second(lambda: step(gradient).numpy() is None, pipe.recv()))


@contextmanager
def tensorflow_peer(size: int) -> Iterator[Pace]:
    """The same on variables of TensorFlow's parameter server."""
    with served(serve_tensorflow) as (address, _), served(push_to_tensorflow, address, size) as (_, pipe):

        def pace(seconds: float) -> float:
            pipe.send(seconds)
            return float(pipe.recv())

        yield pace


@contextmanager
def tcp_peer(size: int) -> Iterator[Pace]:
    """Bytes there and bytes back, nothing computed."""
    data = memoryview(bytearray(4 * size))
    with served(serve_bytes, size) as (port, _), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def round_trip() -> None:
            connection.sendall(data)
            receive(connection, data)

        yield partial(per_second, round_trip)


@contextmanager
def memcpy_peer(size: int) -> Iterator[Pace]:
    """Two copies in one process."""
    source, target = np.ones(size, np.float32), np.zeros(size, np.float32)

    def round_trip() -> None:
        np.copyto(target, source)
        np.copyto(source, target)

    yield partial(per_second, round_trip)


Peer = Ours | Callable[[int], Any]

PEERS: dict[str, Peer] = {
    "nfdt tcp": Ours("asgd", share_memory=False),
    "nfdt shared memory": Ours("asgd", share_memory=True),
    "nfdt shared memory, ddc": Ours("ddc-asgd", share_memory=True),
    "tensorflow ps": tensorflow_peer,
    "raw tcp": tcp_peer,
    "memcpy": memcpy_peer,
}


LINKED: dict[str, Peer] = {
    "identity": Ours("asgd", share_memory=True, mbit=1000),
    "int8": Ours("asgd", share_memory=True, mbit=1000, codec="int8"),
}


def per_second(round_trip: RoundTrip, seconds: float) -> float:
    """How often it is done per second, over at least ``seconds`` and three times."""
    count, began = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        round_trip()
        count += 1
    return count / (time.perf_counter() - began)


def measure(size: int, peers: dict[str, Peer], *, seconds: float, runs: int) -> dict[str, list[float]]:
    """Every peer by turns, ``runs`` times."""
    ours = {name: peer for name, peer in peers.items() if isinstance(peer, Ours)}
    jobs = sorted({(peer.algorithm, peer.codec) for peer in ours.values()})
    with ExitStack() as stack:
        shards = stack.enter_context(started(serve_shards, layout_of(size), jobs))  # comes up while the others do
        ready = {name: stack.enter_context(peer(size)) for name, peer in peers.items() if not isinstance(peer, Ours)}
        addresses = dict(zip(jobs, shards.first(), strict=True))
        for name, peer in ours.items():
            ready[name] = stack.enter_context(peer.connect(addresses[peer.algorithm, peer.codec], name, size))
        for pace in ready.values():
            pace(seconds / 4)  # compiles, and touches all memory
        found: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(runs):
            for name in peers:
                found[name].append(ready[name](seconds))
    return found


def run(report: Report, sizes: dict[str, int], *, seconds: float, runs: int) -> None:
    """All sizes; the ratios are taken pair by pair within a run."""
    for case, size in sizes.items():
        found = measure(size, PEERS, seconds=seconds, runs=runs)
        report.rows += [Row(case, name, "round trips/s", values) for name, values in found.items()]
        for key, peer in (("tcp", "nfdt tcp"), ("shm", "nfdt shared memory")):
            pairs = zip(found[peer], found["tensorflow ps"], strict=True)
            report.ratios[f"{key}/tensorflow@{case}"] = statistics.median(ours / theirs for ours, theirs in pairs)


def run_linked(report: Report, size: int, *, seconds: float, runs: int) -> None:
    """What int8 gains on a link of 1 Gbit/s, where no computation hides or dilutes it."""
    found = measure(size, LINKED, seconds=seconds, runs=runs)
    report.rows += [Row("1Gbit", f"nfdt, {codec}", "round trips/s", values) for codec, values in found.items()]
    pairs = zip(found["int8"], found["identity"], strict=True)
    report.ratios["int8/identity@1Gbit"] = statistics.median(few / all_ for few, all_ in pairs)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("wire", [SEED])
    sizes = {name: size for name, size in SIZES.items() if not options.quick or size < 10_000_000}
    run(report, sizes, seconds=0.4 if options.quick else 2.0, runs=3 if options.quick else 5)
    if options.quick:
        embedding.run(report, 100_000, seconds=0.5, runs=2, transports=("shm",))
    else:
        embedding.run(report, 1_000_000, seconds=0.5, runs=3)
    run_linked(report, SIZES["2.5M"], seconds=0.5 if options.quick else 2.0, runs=3 if options.quick else 5)
    report.finish(options.json)


if __name__ == "__main__":
    main()
