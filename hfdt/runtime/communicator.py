"""Collective communication of the ranks apart from gradients, and the division of a machine between its ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hfdt.keras.compression import find_compressor
from hfdt.keras.horovod_api import init, is_elastic
from hfdt.keras.reduction import Reduction
from nfdt.core.arrays.layout import Array
from nfdt.core.host.launcher_rank import slot_of

FIRST_BYTES = 4096  # short messages take one broadcast, longer ones a second one
_LENGTH = 8


def join_parts(*parts: bytes) -> bytes:
    """Return byte strings as one, from which :func:`split_parts` restores them."""
    return b"".join(len(part).to_bytes(_LENGTH, "little") + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Return the byte strings of :func:`join_parts`, or those of several joined results in order."""
    parts, stop = [], 0
    while stop < len(data):
        start = stop + _LENGTH
        stop = start + int.from_bytes(data[stop:start], "little")
        parts.append(data[start:stop])
    return parts


class Communicator:
    """Position of this process among the ranks, and their collective operations.

    There is one object per process. All ranks call its methods in the same order.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        leader: Rank of the leader.
    """

    def __init__(self) -> None:
        init()
        self.leader = 0
        self.read_position()
        # On one machine an elastic launcher gives every rank a separate host name.
        own = slot_of(os.environ.get("HOROVOD_HOSTNAME", "")) if is_elastic() else None
        self.local_rank = int(hvd.local_rank()) if own is None else own
        self.local_size = int(hvd.local_size()) if own is None else max(self.size, own + 1)

    def read_position(self) -> None:
        """Read rank and size, which change when ranks join or leave."""
        self.rank, self.size = int(hvd.rank()), int(hvd.size())

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.leader

    @property
    def _alone(self) -> bool:
        return self.size == 1 and not is_elastic()  # graphs outlive an elastic communicator

    def close(self) -> None:
        """Shut Horovod down; collective."""
        hvd.shutdown()

    def broadcast(self, data: bytes | None = None) -> bytes:
        """Return the leader's ``data`` on every rank."""
        if self.size == 1:
            return data or b""
        first = np.zeros(FIRST_BYTES, np.uint8)
        if self.leads:
            assert data is not None
            message = join_parts(data)
            first[: min(len(message), FIRST_BYTES)] = np.frombuffer(message[:FIRST_BYTES], np.uint8)
        head = _numpy(mpi_ops.broadcast(tf.constant(first), self.leader, name="hfdt_order"))
        length = int.from_bytes(head[:_LENGTH].tobytes(), "little")
        if length + _LENGTH <= FIRST_BYTES:
            return head[_LENGTH : _LENGTH + length].tobytes()
        rest = np.frombuffer(data, np.uint8) if self.leads else np.zeros(length, np.uint8)  # type: ignore[arg-type]
        return _numpy(mpi_ops.broadcast(tf.constant(rest), self.leader, name="hfdt_message")).tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank."""
        if self.size == 1:
            return [data]
        own = np.frombuffer(join_parts(data), np.uint8)
        return split_parts(_numpy(mpi_ops.allgather(tf.constant(own), name="hfdt_report")).tobytes())

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank."""
        return [json.loads(text) for text in self.gather(json.dumps(value).encode())]

    def reducer(self, codec: str) -> Callable[[Any, str], Any]:
        """Return a function like :meth:`sum` that sends tensors in the format ``identity``, ``fp16`` or ``bf16``.

        Raises:
            UsageError: another codec.
        """
        if codec == "identity" or self._alone:
            return self.sum
        reduction = Reduction("hfdt", hvd.Sum, hvd.global_process_set, find_compressor(codec))
        return lambda tensor, name: reduction.reduce_group([tensor], name)[0]

    def broadcast_vector(self, size: int, vector: Array | None = None, number: int = 0) -> tuple[Array, int]:
        """Return rank 0's ``vector``, shape ``(size,)``, float32, and its ``number`` on every rank."""
        if self.size == 1 and vector is not None:
            return vector, number
        # One message: the integer travels as the bits of the last two elements.
        message = np.zeros(size + 2, np.float32)
        if vector is not None:
            message[:size], message[size:] = vector, np.array([number], np.int64).view(np.float32)
        found = _numpy(mpi_ops.broadcast(tf.constant(message), 0, name="hfdt_weights"))
        return found[:size], int(found[size:].view(np.int64)[0])

    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over all ranks; also usable inside a graph."""
        if self._alone:
            return tensor
        # Horovod matches operations of ranks by their names, which the scopes of a rank's own graph would change.
        return mpi_ops._allreduce(tensor, name=name, op=hvd.Sum, ignore_name_scope=True)


def _numpy(tensor: Any) -> Any:
    return np.asarray(tensor)


def share_machine(communicator: Communicator, neighbours: int = 0) -> None:
    """Limit this rank to its share of the cores, and to one GPU.

    Args:
        communicator: The ranks, some of them on this machine.
        neighbours: Number of ranks of other groups on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // (communicator.local_size + neighbours))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    # Operations of Horovod wait for other ranks: with a single thread nothing else would run meanwhile.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[communicator.local_rank % len(gpus)], "GPU")


def device_name() -> str:
    """Return the device of this rank: ``cpu`` or, as on the worker's machine, ``gpu:0``."""
    gpus = tf.config.get_visible_devices("GPU")
    return gpus[0].name.rpartition("physical_device:")[2].lower() if gpus else "cpu"
