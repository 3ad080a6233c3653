"""Push a gradient and pull new weights, one worker, one shard, SGD with momentum: round trips per second."""

from __future__ import annotations

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

from benchmarks.reports.report import Report, Row, arguments
from benchmarks.workloads import embedding
from benchmarks.workloads.shards import MOMENTUM, RATE, TOKEN, layout_of, serve_shards, served, started
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.wire.job_token import worker_token
from nfdt.transport.choice import make_choice
from nfdt.transport.emulated_link import EmulatedLink
from nfdt.transport.stream import StreamClient

SEED = 1
SIZES = {"0.25M": 250_000, "2.5M": 2_500_000, "25M": 25_000_000}

RoundTrip = Callable[[], object]
RateMeter = Callable[[float], float]
"""Function that measures round trips per second over a number of seconds."""


def serve_tensorflow(pipe: Connection) -> None:
    """Run TensorFlow's own parameter server."""
    import tensorflow as tf

    server = tf.distribute.Server({"ps": ["127.0.0.1:0"]}, job_name="ps", task_index=0, protocol="grpc")
    pipe.send(server.target.removeprefix("grpc://"))
    pipe.recv()


def serve_bytes(pipe: Connection, size: int) -> None:
    """Receive ``size`` numbers over TCP and send as many back."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection, _ = listening.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            buffer = memoryview(bytearray(4 * size))
            while receive(connection, buffer):
                connection.sendall(buffer)


def receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; return False if the other side has closed."""
    got = 0
    while got < len(buffer):
        count = connection.recv_into(buffer[got:])
        if not count:
            return False
        got += count
    return True


@dataclass(frozen=True)
class Ours:
    """NFDT worker that pushes and receives the reply; ``mbit`` is the speed of its emulated link, if any."""

    algorithm: str
    share_memory: bool
    codec: str = "identity"
    mbit: float | None = None

    @contextmanager
    def connect(self, address: str, name: str, size: int) -> Iterator[RateMeter]:
        """Connect to a shard of this algorithm and codec, as worker ``name``."""
        gradient = np.random.default_rng(SEED).normal(0, 0.01, size).astype(np.float32)
        client = StreamClient(
            [address],
            layout_of(size),
            name,
            worker_token(TOKEN, name),
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
    """Run a worker of TensorFlow's parameter server: momentum on the server, then read the weights.

    It needs a separate process, because a process that was once connected to a server always waits for it.
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
def tensorflow_peer(size: int) -> Iterator[RateMeter]:
    """Update variables of TensorFlow's parameter server."""
    with served(serve_tensorflow) as (address, _), served(push_to_tensorflow, address, size) as (_, pipe):

        def pace(seconds: float) -> float:
            pipe.send(seconds)
            return float(pipe.recv())

        yield pace


@contextmanager
def tcp_peer(size: int) -> Iterator[RateMeter]:
    """Send bytes back and forth without computation."""
    data = memoryview(bytearray(4 * size))
    with served(serve_bytes, size) as (port, _), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def round_trip() -> None:
            connection.sendall(data)
            receive(connection, data)

        yield partial(per_second, round_trip)


@contextmanager
def memcpy_peer(size: int) -> Iterator[RateMeter]:
    """Copy twice within one process."""
    source, target = np.ones(size, np.float32), np.zeros(size, np.float32)

    def round_trip() -> None:
        np.copyto(target, source)
        np.copyto(source, target)

    yield partial(per_second, round_trip)


Peer = Ours | Callable[[int], Any]

PEERS: dict[str, Peer] = {
    "nfdt tcp": Ours("asgd", share_memory=False),
    "nfdt tcp, ddc": Ours("ddc-asgd", share_memory=False),
    "nfdt shared memory": Ours("asgd", share_memory=True),
    "nfdt shared memory, ddc": Ours("ddc-asgd", share_memory=True),
    "tensorflow ps": tensorflow_peer,
    "raw tcp": tcp_peer,
    "memcpy": memcpy_peer,
}


RATIOS = {
    "tcp/tensorflow": ("nfdt tcp", "tensorflow ps"),
    "tcp ddc/raw tcp": ("nfdt tcp, ddc", "raw tcp"),
    "shm/tensorflow": ("nfdt shared memory", "tensorflow ps"),
    "shm ddc/tensorflow": ("nfdt shared memory, ddc", "tensorflow ps"),
}

LINKS = {"1Gbit": (1000.0, "int8"), "100Mbit": (100.0, "int4")}  # Mbit/s of a link, and the codec compared on it


def per_second(round_trip: RoundTrip, seconds: float) -> float:
    """Return the calls per second over at least ``seconds`` and three calls."""
    count, began = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - began < seconds:
        round_trip()
        count += 1
    return count / (time.perf_counter() - began)


def measure(size: int, peers: dict[str, Peer], *, seconds: float, runs: int) -> dict[str, list[float]]:
    """Measure every peer in turn, ``runs`` times."""
    ours = {name: peer for name, peer in peers.items() if isinstance(peer, Ours)}
    jobs = sorted({(peer.algorithm, peer.codec) for peer in ours.values()})
    with ExitStack() as stack:
        shards = stack.enter_context(started(serve_shards, layout_of(size), jobs))  # starts while the others do
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
    """Measure all sizes; ratios are computed pairwise within a run."""
    for case, size in sizes.items():
        found = measure(size, PEERS, seconds=seconds, runs=runs)
        report.rows += [Row(case, name, "round trips/s", values) for name, values in found.items()]
        for key, (peer, other) in RATIOS.items():
            pairs = zip(found[peer], found[other], strict=True)
            report.ratios[f"{key}@{case}"] = statistics.median(ours / theirs for ours, theirs in pairs)


def run_linked(report: Report, size: int, *, seconds: float, runs: int) -> None:
    """Measure the gain of a codec on each link without computation, which would hide it."""
    for case, (mbit, codec) in LINKS.items():
        peers: dict[str, Peer] = {
            name: Ours("asgd", share_memory=True, mbit=mbit, codec=name) for name in ("identity", codec)
        }
        found = measure(size, peers, seconds=seconds, runs=runs)
        report.rows += [Row(case, f"nfdt, {name}", "round trips/s", values) for name, values in found.items()]
        pairs = zip(found[codec], found["identity"], strict=True)
        report.ratios[f"{codec}/identity@{case}"] = statistics.median(few / all_ for few, all_ in pairs)


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
