"""The ranks of this world and what they say to each other besides gradients: bytes, to all or from all."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops

FIRST_BYTES = 4096  # short messages take one broadcast, longer ones a second one
_LENGTH = 8


class World:
    """This process among the ranks; made once per process.

    Every method but the properties is collective: all ranks call it, in the same order.
    """

    def __init__(self) -> None:
        hvd.init()
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self.local_rank, self.local_size = int(hvd.local_rank()), int(hvd.local_size())

    def close(self) -> None:
        """Leave the world; the others have to do so too."""
        hvd.shutdown()

    def broadcast(self, data: bytes | None = None) -> bytes:
        """Rank 0's ``data`` on every rank."""
        if self.size == 1:
            return data or b""
        first = np.zeros(FIRST_BYTES, np.uint8)
        if self.rank == 0:
            assert data is not None
            message = len(data).to_bytes(_LENGTH, "little") + data
            first[: min(len(message), FIRST_BYTES)] = np.frombuffer(message[:FIRST_BYTES], np.uint8)
        head = _numpy(mpi_ops.broadcast(tf.constant(first), 0, name="hfdt_order"))
        length = int.from_bytes(head[:_LENGTH].tobytes(), "little")
        if length + _LENGTH <= FIRST_BYTES:
            return head[_LENGTH : _LENGTH + length].tobytes()
        rest = np.frombuffer(data, np.uint8) if self.rank == 0 else np.zeros(length, np.uint8)  # type: ignore[arg-type]
        return _numpy(mpi_ops.broadcast(tf.constant(rest), 0, name="hfdt_message")).tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, by rank."""
        if self.size == 1:
            return [data]
        own = np.frombuffer(len(data).to_bytes(_LENGTH, "little") + data, np.uint8)
        joined = _numpy(mpi_ops.allgather(tf.constant(own), name="hfdt_report")).tobytes()
        found, at = [], 0
        while at < len(joined):
            start = at + _LENGTH
            at = start + int.from_bytes(joined[at:start], "little")
            found.append(joined[start:at])
        return found

    def sum(self, tensor: Any, name: str) -> Any:
        """The sum of a tensor over all ranks; also inside a graph."""
        if self.size == 1:
            return tensor
        return mpi_ops._allreduce(tensor, name=name, op=hvd.Sum, ignore_name_scope=True)


def is_broken_world(error: BaseException) -> bool:
    """Whether this is the end of another rank, as seen from here: that one knows the reason."""
    return isinstance(error, tf.errors.OpError) and any(name in str(error) for name in ("Horovod", "horovod", "hfdt_"))


def _numpy(tensor: Any) -> Any:
    return np.asarray(tensor)
