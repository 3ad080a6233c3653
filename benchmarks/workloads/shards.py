"""Shards and other peers of a benchmark, each in a separate process."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.specs.job import resolve_algorithm
from nfdt.model.program.manifest import Manifest

if TYPE_CHECKING:
    from nfdt.shard.servicer import RunningShard

TOKEN = "t" * 32  # a shard and its workers run only as long as the program that started them
RATE, MOMENTUM = 1e-4, 0.9
START_S = 60.0
UNITS = 250  # of the layer that a kernel belongs to


def layout_of(size: int, variables: int = 1) -> ParameterLayout:
    """Return the layout of ``size`` numbers in kernels of equal size, or in vectors if that is no multiple of UNITS."""
    length = size // variables
    shape = (length,) if length % UNITS else (length // UNITS, UNITS)
    return ParameterLayout.of([(f"v{i}", shape) for i in range(variables)])


def start(
    layout: ParameterLayout,
    algorithm: str,
    index: int = 0,
    shards: int = 1,
    workers: int = 1,
    codec: str = "identity",
) -> RunningShard:
    """Start a shard in this process; it serves as long as the returned object is referenced."""
    import keras

    from nfdt.model.program.state import State
    from nfdt.shard.servicer import start_shard

    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    scalar = {"shape": [], "variable": -1}
    velocities = [{"shape": slot.shape, "dtype": "float32", "variable": i} for i, slot in enumerate(layout.slots)]
    entries = {
        "layout": layout.to_json(),
        "optimizer": keras.saving.serialize_keras_object(optimizer),
        "optimizer_variables": [{**scalar, "dtype": "int64"}, {**scalar, "dtype": "float32"}, *velocities],
        "elementwise": True,
        "constraints": [None] * len(layout.slots),
        "decay": [True] * len(layout.slots),
    }
    state = State(np.zeros(layout.size, np.float32))
    row = resolve_algorithm(algorithm, codec=codec)
    return start_shard(Manifest(entries), state, row, index, shards, workers=workers, token=TOKEN, leased=False)


def serve_shard(pipe: Connection, *shard: Any) -> None:
    """Serve a shard, see :func:`start`; answer each message with its private bytes, until the process is terminated."""
    running = start(*shard)
    pipe.send(running.address)
    while True:
        pipe.recv()
        ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator caches is not in use
        pipe.send(psutil.Process().memory_full_info().uss)


def serve_shards(pipe: Connection, layout: ParameterLayout, jobs: list[tuple[str, str]]) -> None:
    """Serve a shard for every (algorithm, codec) in this process until terminated; one is used at a time."""
    running = [start(layout, algorithm, codec=codec) for algorithm, codec in jobs]
    pipe.send([shard.address for shard in running])
    pipe.recv()


class Running:
    """Running process, and the pipe to it."""

    def __init__(self, name: str, pipe: Connection) -> None:
        self._name, self.pipe = name, pipe

    def first(self) -> Any:
        """Wait for the first message of the process and return it."""
        if not self.pipe.poll(START_S):
            raise TimeoutError(f"{self._name}: expected it to serve within {START_S:g} s. Received: nothing.")
        return self.pipe.recv()


@contextmanager
def started(target: Callable[..., None], *arguments: Any) -> Iterator[Running]:
    """Run ``target`` in a separate process until the block ends."""
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
    """Run ``target`` in a separate process; yield its first message and the pipe to it."""
    with started(target, *arguments) as running:
        yield running.first(), running.pipe
