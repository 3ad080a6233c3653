"""Ranks on PyTorch: processes of one group of ``torch.distributed``, whose collectives are Gloo's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hfdt.runtime.communicator import Communicator
from hfdt.runtime.network_interface import interface_of
from hfdt.runtime.rendezvous_relay import Exchange
from hfdt.runtime.torch_step import TorchRankStep, flat_weights
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ServerUnreachable
from nfdt.core.host.link_probes import LinkProbes
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import LOOPBACK
from nfdt.core.wire.rank_sockets import RankSockets
from nfdt.model.backends.contract import current
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

JOIN_S = 60.0  # time for all ranks to join
WAIT = timedelta(days=365)  # for another rank: its end closes its connections, and the server watches it


class RendezvousStore(dist.Store):
    """Store of ``torch.distributed`` at the job server, which has a token and TLS; PyTorch's own are open to all.

    Args:
        exchange: Access to the rendezvous of the ring.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._exchange(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value that another rank stores.

        Raises:
            RuntimeError: It was not stored in time.
        """
        deadline = time.monotonic() + JOIN_S
        while time.monotonic() < deadline:
            if (value := self._exchange(key, None)) is not None:  # waits at the server for a second
                return value
        raise RuntimeError(f"Gloo: rank {key.rpartition('/')[2]} did not join within {JOIN_S:.0f} s")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for values of other ranks."""
        for key in keys:
            self.get(key)


class TorchRanks(Communicator):
    """The processes of a group; sums are made on processors, also of gradients that come from a GPU.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        group: Group of all ranks.
    """

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def join(cls, assignment: pb.RankAssignment, exchange: Exchange) -> TorchRanks:
        """Join the group of an assignment.

        Raises:
            ServerUnreachable: The ranks did not find each other.
        """
        rank, size = assignment.rank, int(assignment.environment["HOROVOD_SIZE"])
        sockets = RankSockets()
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(assignment.host or LOOPBACK)
        try:
            with sockets.recorded():
                ranks = cls(rank, size, dist.ProcessGroupGloo(RendezvousStore(exchange), rank, size, timeout=WAIT))
                ranks.gather(b"")
        except RuntimeError as error:
            raise ServerUnreachable(f"Rank {rank} could not join the other ranks: {error}") from error
        sockets.probe(LinkProbes.read(os.environ))
        return ranks

    @staticmethod
    def is_broken(error: BaseException) -> bool:
        """Return whether an error is one of Gloo."""
        return isinstance(error, RuntimeError) and "gloo" in str(error).lower()

    def close(self) -> None:
        """Wait for the others, so that no connection ends too early; collective."""
        self.gather(b"")

    # ---- messages

    def _from_leader(self, values: Array, name: str) -> Array:
        sent = torch.from_numpy(np.array(values))
        self._group.broadcast(sent, self.leader).wait()
        found: Array = sent.numpy()
        return found

    def _joined(self, data: bytes) -> bytes:
        lengths = [int(length[0]) for length in self._all(np.array([len(data)], np.int64))]
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        return b"".join(row[:length].tobytes() for row, length in zip(self._all(padded), lengths, strict=True))

    def _all(self, values: Array) -> list[Array]:
        """Return the values of all ranks, which have one shape."""
        own = torch.from_numpy(values)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([found], [own]).wait()
        return [each.numpy() for each in found]

    def sum_vector(self, vector: Any, weight: float = 1.0) -> Array:
        """Return the weighted sum of the vectors of all ranks."""
        return self.sum(np.float32(weight) * np.asarray(vector, np.float32))

    def sum(self, vector: Array, dtype: torch.dtype = torch.float32) -> Array:
        """Return the sum of the vectors of all ranks, shape ``(n,)``, float32.

        Args:
            vector: This rank's; its memory may be that of the result.
            dtype: Type of the numbers that travel.
        """
        total = torch.from_numpy(vector).to(dtype)
        if self.size > 1:
            self._group.allreduce([total]).wait()
        found: Array = total.to(torch.float32).numpy()
        return found

    # ---- steps

    def training_step(self, model: Any, manifest: Manifest, state: State, codec: str, *, scales: bool) -> TorchRankStep:
        """Return a step that works on the model's variables."""
        return TorchRankStep(model, manifest, state, self.sum, codec, scales=scales)

    def test_step(self, model: Any, manifest: Manifest) -> Callable[[Any], Mapping[str, Any]]:
        """Return ``test_step`` on the model's variables."""
        run = current().call(model, manifest.layout, "test_step")
        return lambda batch: run(flat_weights(model.trainable_variables, manifest.layout), batch)

    # ---- the machine

    def share_machine(self, neighbours: int = 0) -> None:
        """Limit this rank to its share of the cores."""
        cores, ranks = len(os.sched_getaffinity(0)), int(os.environ["HOROVOD_LOCAL_SIZE"])
        torch.set_num_threads(max(1, cores // (ranks + neighbours)))

    def device_name(self) -> str:
        """Return the device on which this rank computes."""
        return f"gpu:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


RANKS = TorchRanks
