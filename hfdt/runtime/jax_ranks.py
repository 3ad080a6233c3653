"""Ranks on JAX: processes of one ``jax.distributed`` world, whose collectives are Gloo's, or NCCL's between GPUs.

``jax.distributed.initialize`` is taken apart here, because it cannot be told which network interface Gloo uses, and
because the loss of its coordinator aborts every process before the server can say which rank was lost.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hfdt.runtime.communicator import FIRST_BYTES, LENGTH_BYTES, Communicator, join_parts
from hfdt.runtime.jax_step import JaxRankStep
from hfdt.runtime.network_interface import interface_of, own_address
from hfdt.runtime.rendezvous_relay import Exchange
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ServerUnreachable
from nfdt.core.host.link_probes import LinkProbes
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import LOOPBACK, join_address
from nfdt.core.wire.rank_sockets import RankSockets
from nfdt.model.backends.contract import current
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

COORDINATOR = "coordinator"  # key of its address
JOIN_S = 60  # time for all ranks to join
END_S = 5  # time for all ranks to leave the coordinator
AXIS = "ranks"  # of the mesh


class JaxRanks(Communicator):
    """The processes of a world, one device of each.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self._device = first[rank]
        mesh = Mesh(np.array([first[each] for each in range(size)]), (AXIS,))
        self._by_rank, everywhere = NamedSharding(mesh, PartitionSpec(AXIS)), NamedSharding(mesh, PartitionSpec())
        self._sum: Any = jax.jit(lambda arrays: [a.sum(0, dtype=a.dtype) for a in arrays], out_shardings=everywhere)
        self._all: Any = jax.jit(lambda array: array, out_shardings=everywhere)

    @classmethod
    def join(cls, assignment: pb.RankAssignment, exchange: Exchange) -> JaxRanks:
        """Join the world of an assignment; the coordinator exists until all ranks are connected, unless they use NCCL.

        Raises:
            ServerUnreachable: The ranks did not find each other.
        """
        rank, size = assignment.rank, int(assignment.environment["HOROVOD_SIZE"])
        sockets = RankSockets()
        try:
            with sockets.recorded(), _coordinated(rank, size, assignment.host or LOOPBACK, exchange):
                ranks = cls(rank, size)
                ranks.gather(b"")  # connects them
        except ValueError as error:  # of Gloo; JAX has no class of its own for it
            raise ServerUnreachable(f"Rank {rank} could not join the other ranks: {error}") from error
        sockets.probe(LinkProbes.read(os.environ))
        return ranks

    @staticmethod
    def is_broken(error: BaseException) -> bool:
        """Return whether an error is one of Gloo or NCCL."""
        return isinstance(error, ValueError | RuntimeError) and any(name in str(error) for name in ("Gloo ", "NCCL"))

    def close(self) -> None:
        """Wait for the others, so that no connection ends too early; collective."""
        self.gather(b"")

    # ---- messages

    def _from_leader(self, values: Array, name: str) -> Array:
        # The lengths of messages vary, those of vectors do not.
        padded = np.zeros(_padded(len(values)) if values.dtype == np.uint8 else len(values), values.dtype)
        if self.leads:
            padded[: len(values)] = values
        (found,) = self.sum([padded[None]])
        return np.asarray(found)[: len(values)]

    def _joined(self, data: bytes) -> bytes:
        message, width = join_parts(data), FIRST_BYTES
        heads = self._rows(message[:width], width)
        lengths = [LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES].tobytes(), "little") for head in heads]
        if (longest := max(lengths)) > width:
            heads = self._rows(message, _padded(longest))
        own = [head[:length].tobytes() for head, length in zip(heads, lengths, strict=True)]
        return b"".join(each[LENGTH_BYTES:] for each in own)

    def _rows(self, data: bytes, width: int) -> Array:
        """Return the bytes of all ranks, shape ``(size, width)``, uint8."""
        row = np.zeros((1, width), np.uint8)
        row[0, : len(data)] = np.frombuffer(data, np.uint8)
        return np.asarray(self._all(self._global(row)).addressable_data(0))

    def sum_vector(self, vector: Any, weight: float = 1.0) -> Array:
        """Return the weighted sum of the vectors of all ranks."""
        (total,) = self.sum([np.float32(weight) * np.asarray(vector)[None]])
        return np.asarray(total)

    def sum(self, rows: Sequence[Any]) -> list[Any]:
        """Return the sums of arrays over all ranks, each of shape ``(n,)`` on this rank's device.

        Args:
            rows: Arrays of this rank, each of shape ``(1, n)``.
        """
        if self.size == 1:
            return [row[0] for row in rows]
        found = [total.addressable_data(0) for total in self._sum([self._global(row) for row in rows])]
        # Two operations at the same time might meet those of the other ranks in another order.
        waited: list[Any] = jax.block_until_ready(found)
        return waited

    def _global(self, row: Any) -> Any:
        own = jax.device_put(row, self._device)
        return jax.make_array_from_single_device_arrays((self.size, *own.shape[1:]), self._by_rank, [own])

    # ---- steps

    def training_step(self, model: Any, manifest: Manifest, state: State, codec: str, *, scales: bool) -> JaxRankStep:
        """Return a step of three compiled functions: gradient, sum over the ranks, update."""
        return JaxRankStep(model, manifest, state, self.sum, codec, scales=scales)

    def test_step(self, model: Any, manifest: Manifest) -> Callable[[Any], Mapping[str, Any]]:
        """Return ``test_step`` as a function of the model's state."""
        run = current().call(model, manifest.layout, "test_step")
        return lambda batch: run([variable.value for variable in model.trainable_variables], batch)

    # ---- the machine

    def share_machine(self, neighbours: int = 0) -> None:
        """Do nothing: JAX cannot limit its threads, and a slot has GPUs of its own."""

    def device_name(self) -> str:
        """Return the device of this rank."""
        platform = self._device.platform
        return platform if platform == "cpu" else f"{platform}:{self._device.local_hardware_id}"


RANKS = JaxRanks


def _padded(length: int) -> int:
    """Return the next power of two, so that few shapes are compiled."""
    return max(FIRST_BYTES, 1 << (length - 1).bit_length())


@contextmanager
def _coordinated(rank: int, size: int, host: str, exchange: Exchange) -> Iterator[None]:
    """Let JAX know the other processes, with a coordinator in rank 0 that ends with the block.

    The ranks connect in the block. Gloo's connections then need no coordinator. NCCL may make more of them later, so
    that between GPUs it stays.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        host: Address of this machine at which the other ranks reach it.
        exchange: Access to the rendezvous of the ring.
    """
    limits = {"heartbeat_timeout": JOIN_S, "shutdown_timeout": END_S}
    service = None
    if rank == 0:
        with _reserved(host) as address:
            service = _jax.get_distributed_runtime_service(address, size, **limits)
        exchange(COORDINATOR, address.encode())
    else:
        address = _await_address(exchange)
    client = _jax.get_distributed_runtime_client(
        address, rank, init_timeout=JOIN_S, shutdown_on_destruction=False, **limits
    )
    client.connect()
    known = distributed.global_state
    known.process_id, known.num_processes, known.client, known.service = rank, size, client, service
    gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, interface=interface_of(host))
    processors = partial(xla_bridge.make_cpu_client, gloo)
    xla_bridge.register_backend_factory("cpu", processors, priority=0, fail_quietly=False)
    yield
    if jax.default_backend() == "cpu":
        known.client = known.service = None
        client.shutdown()
        if service is not None:
            service.shutdown()


@contextmanager
def _reserved(host: str) -> Iterator[str]:
    """Yield an address of this machine, whose port nobody else can take before gRPC serves there."""
    found = own_address(host)
    with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
        held.bind((found, 0))
        yield join_address(found, held.getsockname()[1])


def _await_address(exchange: Exchange) -> str:
    deadline = time.monotonic() + JOIN_S
    while time.monotonic() < deadline:
        if found := exchange(COORDINATOR, None):  # waits at the server for a second
            return found.decode()
    raise ServerUnreachable(f"Rank 0 did not serve the coordinator of JAX within {JOIN_S} s.")
