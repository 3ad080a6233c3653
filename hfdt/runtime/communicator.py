"""The axis of collectives: what the ranks of one backend have in common, apart from the job that they train.

A ring is one job server's worker whatever its ranks compute on (docs/decisions/0003). Each backend has one module here,
``<backend>_ranks``, whose ``RANKS`` is its :class:`Communicator`.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hfdt.runtime.rank_step import RankStep
from hfdt.runtime.rendezvous_relay import Exchange
from nfdt.core.arrays.layout import Array
from nfdt.core.wire import workers_pb2 as pb
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

FIRST_BYTES = 4096  # short messages take one operation, longer ones a second one
LENGTH_BYTES = 8


def join_parts(*parts: bytes) -> bytes:
    """Return byte strings as one, from which :func:`split_parts` restores them."""
    return b"".join(len(part).to_bytes(LENGTH_BYTES, "little") + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Return the byte strings of :func:`join_parts`, or those of several joined results in order."""
    parts, stop = [], 0
    while stop < len(data):
        start = stop + LENGTH_BYTES
        stop = start + int.from_bytes(data[stop:start], "little")
        parts.append(data[start:stop])
    return parts


class Communicator(ABC):
    """Position of this process among the ranks, their collective operations, and the steps that use these.

    There is one object per process. All ranks call its methods in the same order.

    Attributes:
        rank: Rank of this process.
        size: Number of ranks.
        leader: Rank of the leader.
    """

    rank: int
    size: int
    leader = 0

    @classmethod
    @abstractmethod
    def join(cls, assignment: pb.RankAssignment, exchange: Exchange) -> Communicator:
        """Join the other ranks of a ring in worker slots; return when all are connected.

        Args:
            assignment: Place of the rank.
            exchange: Access to the ring's rendezvous at the job server.
        """

    @staticmethod
    @abstractmethod
    def is_broken(error: BaseException) -> bool:
        """Return whether an error is caused by the end of another rank, whose own error has the reason."""

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.leader

    @abstractmethod
    def close(self) -> None:
        """Leave the ranks; collective."""

    # ---- messages

    def broadcast(self, data: bytes | None = None) -> bytes:
        """Return the leader's ``data`` on every rank."""
        if self.size == 1:
            return data or b""
        first = np.zeros(FIRST_BYTES, np.uint8)
        if self.leads:
            assert data is not None
            message = join_parts(data)
            first[: min(len(message), FIRST_BYTES)] = np.frombuffer(message[:FIRST_BYTES], np.uint8)
        head = self._from_leader(first, "hfdt_order")
        length = int.from_bytes(head[:LENGTH_BYTES].tobytes(), "little")
        if length + LENGTH_BYTES <= FIRST_BYTES:
            return head[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
        rest = np.frombuffer(data, np.uint8) if self.leads else np.zeros(length, np.uint8)  # type: ignore[arg-type]
        return self._from_leader(rest, "hfdt_message").tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank."""
        if self.size == 1:
            return [data]
        return split_parts(self._joined(join_parts(data)))

    def gather_json(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank."""
        return [json.loads(text) for text in self.gather(json.dumps(value).encode())]

    @abstractmethod
    def _from_leader(self, values: Array, name: str) -> Array:
        """Return the leader's values, shape ``(n,)``, of integers; those of the other ranks have the same shape."""

    @abstractmethod
    def _joined(self, data: bytes) -> bytes:
        """Return the byte strings of all ranks as one, by rank."""

    # ---- vectors

    def broadcast_vector(self, size: int, vector: Array | None = None, number: int = 0) -> tuple[Array, int]:
        """Return the leader's ``vector``, shape ``(size,)``, float32, and its ``number`` on every rank."""
        if self.size == 1 and vector is not None:
            return vector, number
        # One message: the number travels as the bits of the last two elements.
        message = np.zeros(size + 2, np.float32)
        if vector is not None:
            message[:size], message[size:] = vector, np.array([number], np.int64).view(np.float32)
        found = self._from_leader(message.view(np.int32), "hfdt_weights").view(np.float32)
        return found[:size], int(found[size:].view(np.int64)[0])

    @abstractmethod
    def sum_vector(self, vector: Any, weight: float = 1.0) -> Array:
        """Return the weighted sum of the vectors of all ranks.

        Args:
            vector: This rank's, a tensor or an array, shape ``(n,)``, float32.
            weight: Its weight.
        """

    # ---- steps

    @abstractmethod
    def training_step(self, model: Any, manifest: Manifest, state: State, codec: str, *, scales: bool) -> RankStep:
        """Return the synchronous step of a compiled, built model.

        Args:
            model: The model.
            manifest: Its program.
            state: Initial state.
            codec: Format in which gradients are sent: ``identity``, ``fp16`` or ``bf16``.
            scales: Whether :meth:`RankStep.set_factor` will be called.
        """

    @abstractmethod
    def test_step(self, model: Any, manifest: Manifest) -> Callable[[Any], Mapping[str, Any]]:
        """Return ``test_step`` of a model at its present weights, a function of a pytree of arrays. Not collective."""

    # ---- the machine

    @abstractmethod
    def share_machine(self, neighbours: int = 0) -> None:
        """Limit this rank to its share of the machine, where the backend can.

        ``neighbours``: number of ranks of other groups on this machine.
        """

    @abstractmethod
    def device_name(self) -> str:
        """Return the device of this rank: ``cpu`` or, as on the worker's machine, ``gpu:0``."""


def ranks_of_backend() -> type[Communicator]:
    """Return the communicator of the backend that Keras has loaded."""
    module = importlib.import_module(f"hfdt.runtime.{keras.backend.backend()}_ranks")
    found: type[Communicator] = module.RANKS
    return found
