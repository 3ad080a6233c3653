"""Clients of a job's shards: flush, learning rate, reading and writing their state."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import grpc

from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import NfdtError, ProtocolError, ServerUnreachable, ShapeMismatch
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.state import State
from nfdt.core.sharding.state_cut import StateCut
from nfdt.core.wire import shards_pb2 as pb
from nfdt.core.wire import shards_pb2_grpc
from nfdt.core.wire.channel import CHUNK_BYTES, DATA_BYTES, is_loopback, open_channel, split_address
from nfdt.core.wire.status import translated

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
STATE_TIMEOUT_S = 600.0
MAX_STATE_FACTOR = 16  # limit of a shard's state as a multiple of its weights, at least MIN_STATE_BYTES
MIN_STATE_BYTES = 2**26


class ShardClients(Protocol):
    """Interface to all shards of one job together."""

    def close(self) -> None:
        """Close the connections; running calls fail."""
        ...

    def flush(self) -> None:
        """Apply gradients that softsync still holds."""
        ...

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate."""
        ...

    def forget(self, worker: str) -> None:
        """Drop the backups of a lost worker."""
        ...

    def statistics(self) -> list[Mapping[str, Any]]:
        """Return the counts of each shard, in order."""
        ...

    def read(self) -> State:
        """Return the weights and optimizer variables of all shards."""
        ...

    def write(self, state: State) -> None:
        """Replace the weights, and the optimizer variables that the state has."""
        ...


class GrpcShardClients:
    """Client that calls all shards of one job in parallel, each with a deadline; a :class:`ShardClients`.

    Args:
        addresses: Addresses of the shards, in order.
        layout: Layout of all trainable variables.
        token: Key of the job.
        owners: Trainable variable to which each optimizer variable belongs, -1 for none; None: unknown.
        authority: PEM certificate of the authority of those shards that are not on loopback; None: plain text.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        layout: ParameterLayout,
        token: str,
        *,
        owners: Sequence[int] | None = None,
        authority: bytes | None = None,
    ) -> None:
        self._addresses = list(addresses)
        self._cut = StateCut(layout, len(addresses), owners)
        self._channels = [_open(address, token, authority) for address in addresses]
        self._stubs: list[Any] = [shards_pb2_grpc.ShardStub(channel) for channel in self._channels]
        self._pool = ThreadPoolExecutor(len(self._stubs), thread_name_prefix="shards")

    def close(self) -> None:
        """Close the channels; running calls fail."""
        for channel in self._channels:
            channel.close()
        self._pool.shutdown(wait=False)

    def _on_all(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(partial(_again, call), range(len(self._stubs))))

    def _administer(self, request: pb.AdminRequest) -> list[pb.AdminReply]:
        def call(index: int) -> pb.AdminReply:
            with translated(f"shard {index} at {self._addresses[index]}"):
                return self._stubs[index].Administer(request, timeout=CALL_TIMEOUT_S)

        return self._on_all(call)

    def flush(self) -> None:
        """Apply gradients that softsync still holds."""
        self._administer(pb.AdminRequest(flush=pb.Flush()))

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate."""
        self._administer(pb.AdminRequest(learning_rate=pb.ShardLearningRate(value=value)))

    def forget(self, worker: str) -> None:
        """Drop the backups of a lost worker. The loss of a shard ends the job elsewhere."""
        try:
            self._administer(pb.AdminRequest(forget=pb.ForgetWorker(worker=worker)))
        except NfdtError as error:
            _log.info("%s", error)

    def statistics(self) -> list[Mapping[str, Any]]:
        """Return the counts of each shard, in order."""
        replies = self._administer(pb.AdminRequest(statistics=pb.ShardStatistics()))
        return [json.loads(reply.statistics_json or "{}") for reply in replies]

    def read(self) -> State:
        """Return the joined weights and optimizer variables of all shards, which hold no untrained state.

        Raises:
            NfdtError: A shard does not answer, or its reply has another size.
        """
        parts: list[dict[str, Array]] = self._on_all(self._read_one)
        return self._cut.joined([(part["weights"], _optimizer_of(part)) for part in parts])

    def _read_one(self, index: int) -> dict[str, Array]:
        size = self._cut.size(index)
        limit = max(MIN_STATE_BYTES, MAX_STATE_FACTOR * 4 * size)
        with translated(f"shard {index} at {self._addresses[index]}"):
            arrays = load_arrays(_gather(self._stubs[index].Read(pb.ReadRequest(), timeout=STATE_TIMEOUT_S), limit))
        weights = arrays.get("weights")
        if weights is None or weights.size != size:
            received = "none" if weights is None else str(weights.size)
            raise ShapeMismatch(f"Shard {index}: expected {size} weights. Received: {received}.")
        return arrays

    def write(self, state: State) -> None:
        """Replace the weights of all shards, and the optimizer variables that the state has."""
        self._cut.check(state)

        def call(index: int) -> None:
            with translated(f"shard {index} at {self._addresses[index]}"):
                weights, optimizer = self._cut.own(state, index)
                data = dump_arrays({"weights": weights, **{f"optimizer/{i}": a for i, a in optimizer.items()}})
                self._stubs[index].Write(_chunks(data), timeout=STATE_TIMEOUT_S)

        self._on_all(call)


def _again(call: Callable[[int], Any], index: int) -> Any:
    """Make a call, twice if its connection was lost, because connections of a suspended server may be dead."""
    try:
        return call(index)
    except ServerUnreachable as error:
        lost = error.__cause__
        if not isinstance(lost, grpc.RpcError) or lost.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return call(index)


def _optimizer_of(part: Mapping[str, Array]) -> dict[int, Array]:
    named = [(name.partition("/"), array) for name, array in part.items()]
    return {int(index): a for (group, _, index), a in named if group == "optimizer" and index.isdecimal()}


def connect_shards(
    addresses: Sequence[str], manifest: Manifest, token: str, *, authority: bytes | None = None
) -> ShardClients:
    """Return the client of the shards that hold a program."""
    return GrpcShardClients(addresses, manifest.layout, token, owners=manifest.optimizer_owners, authority=authority)


def _open(address: str, token: str, authority: bytes | None) -> grpc.Channel:
    trusted = None if is_loopback(split_address(address)[0]) else authority
    return open_channel(address, token, ca_file=trusted, max_message_bytes=DATA_BYTES)


def _gather(chunks: Iterable[pb.StateChunk], limit: int) -> bytes:
    data = io.BytesIO()  # returns its bytes without a copy
    for chunk in chunks:
        at = data.tell()
        if chunk.total_bytes > limit:
            raise ProtocolError(f"Shard state: expected at most {limit} bytes. Received: {chunk.total_bytes}.")
        if chunk.offset != at or at + len(chunk.data) > chunk.total_bytes:
            raise ProtocolError(f"Shard state: expected byte {at}. Received: byte {chunk.offset}.")
        data.write(chunk.data)
    return data.getvalue()


def _chunks(data: bytes) -> Iterator[pb.StateChunk]:
    for offset in range(0, max(len(data), 1), CHUNK_BYTES):
        yield pb.StateChunk(offset=offset, total_bytes=len(data), data=data[offset : offset + CHUNK_BYTES])
