"""Clients of a job's shards: flush, learning rate, reading and writing their state."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.core.sharding.plan import StateCut
from nfdt.core.sharding.records import closed_round_of, join_records
from nfdt.core.wire import shards_pb2 as pb
from nfdt.core.wire import shards_pb2_grpc
from nfdt.core.wire.channel import CHUNK_BYTES, DATA_BYTES, is_loopback, open_channel, split_address
from nfdt.core.wire.status import translated
from nfdt.core.work.tasks import TaskNumbers
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

CALL_TIMEOUT_S = 60.0
STATE_TIMEOUT_S = 600.0
MAX_STATE_FACTOR = 16  # limit of a shard's state as a multiple of its weights, at least MIN_STATE_BYTES
MIN_STATE_BYTES = 2**26
MAX_SNAPSHOT_FACTOR = 1024  # limit with records: update rules may have a few vectors for each worker


@dataclass(frozen=True)
class ShardSnapshot:
    """Copy of all shards of a job, each at one moment; shards can be started again from it.

    Attributes:
        state: Weights and optimizer variables.
        records: Records of all shards; see :mod:`nfdt.core.sharding.records`.
        tasks: For each shard, the tasks whose updates it contains; none in a job with rounds.
        closed_rounds: For each shard, its newest closed round; 0 in a job without rounds.
    """

    state: State
    records: Mapping[str, Array]
    tasks: tuple[TaskNumbers, ...]
    closed_rounds: tuple[int, ...]


class ShardClients(Protocol):
    """Interface to all shards of one job together."""

    def close(self) -> None:
        """Close the connections; running calls fail."""

    def flush(self) -> None:
        """Apply gradients that softsync still holds."""

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate."""

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        """Drop the backups of a lost worker and refuse its pushes; return those of its tasks that each has applied."""

    def statistics(self) -> list[Mapping[str, Any]]:
        """Return the counts of each shard, in order."""

    def read(self) -> State:
        """Return the weights and optimizer variables of all shards."""

    def snapshot(self, copied: Callable[[], None]) -> ShardSnapshot:
        """Return the state and records of all shards.

        ``copied`` is called exactly once: when all shards have taken their copies and only the transfer is left, or
        when the snapshot has failed.
        """

    def write(self, state: State) -> None:
        """Replace the weights, and the optimizer variables that the state has."""


class _Countdown:
    """Call of ``then`` as soon as every member has been counted; thread-safe."""

    def __init__(self, members: Iterable[int], then: Callable[[], None]) -> None:
        self._missing, self._then = set(members), then
        self._lock = threading.Lock()

    def count(self, member: int) -> None:
        """Count a member; it is counted once."""
        with self._lock:
            last = self._missing == {member}
            self._missing.discard(member)
        if last:
            self._then()


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
        return list(self._pool.map(partial(self._on_one, call), range(len(self._stubs))))

    def _on_one(self, call: Callable[[int], Any], index: int) -> Any:
        with translated(f"shard {index} at {self._addresses[index]}"):
            return _again(call, index)

    def _administer(self, request: pb.AdminRequest) -> list[pb.AdminReply]:
        def call(index: int) -> pb.AdminReply:
            return self._stubs[index].Administer(request, timeout=CALL_TIMEOUT_S)

        return self._on_all(call)

    def flush(self) -> None:
        """Apply gradients that softsync still holds."""
        self._administer(pb.AdminRequest(flush=pb.Flush()))

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate."""
        self._administer(pb.AdminRequest(learning_rate=pb.ShardLearningRate(value=value)))

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        """Drop the backups of a lost worker and refuse its pushes; return those of its tasks that each has applied."""
        replies = self._administer(pb.AdminRequest(forget=pb.ForgetWorker(worker=worker, tasks=tasks)))
        return [frozenset(reply.applied) for reply in replies]

    def statistics(self) -> list[Mapping[str, Any]]:
        """Return the counts of each shard, in order."""
        replies = self._administer(pb.AdminRequest(statistics=pb.ShardStatistics()))
        return [json.loads(reply.statistics_json or "{}") for reply in replies]

    def read(self) -> State:
        """Return the joined weights and optimizer variables of all shards, which hold no untrained state.

        Raises:
            NfdtError: A shard does not answer, or its reply has another size.
        """
        return self._joined(self._on_all(lambda index: self._read_one(index, pb.ReadRequest())))

    def snapshot(self, copied: Callable[[], None]) -> ShardSnapshot:
        """Return the state and records of all shards; see :class:`ShardClients`.

        No call is made twice: the second copy of a shard would be taken later than those of the others.

        Raises:
            NfdtError: A shard does not answer, or its reply has another size or no records.
        """
        shards = range(len(self._stubs))
        copies = _Countdown(shards, copied)

        def read(index: int) -> dict[str, Array]:
            try:
                with translated(f"shard {index} at {self._addresses[index]}"):
                    return self._read_one(index, pb.ReadRequest(records=True), begun=lambda: copies.count(index))
            finally:
                copies.count(index)

        try:
            with ThreadPoolExecutor(len(shards), thread_name_prefix="snapshot") as pool:  # other calls need not wait
                parts = list(pool.map(read, shards))
        finally:
            for index in shards:
                copies.count(index)
        records = [_records_of(index, part) for index, part in enumerate(parts)]
        tasks = tuple(TaskNumbers(each.get("tasks", ())) for each in records)
        return ShardSnapshot(self._joined(parts), join_records(records), tasks, tuple(map(closed_round_of, records)))

    def _joined(self, parts: Sequence[Mapping[str, Array]]) -> State:
        return self._cut.joined([(part["weights"], _optimizer_of(part)) for part in parts])

    def _read_one(
        self, index: int, request: pb.ReadRequest, *, begun: Callable[[], None] = lambda: None
    ) -> dict[str, Array]:
        """Return what a shard replies; ``begun`` is called for its first chunk."""
        size = self._cut.size(index)
        factor = MAX_SNAPSHOT_FACTOR if request.records else MAX_STATE_FACTOR
        limit = max(MIN_STATE_BYTES, factor * 4 * size)
        chunks = self._stubs[index].Read(request, timeout=STATE_TIMEOUT_S)
        arrays = load_arrays(_gather(chunks, limit, begun))
        weights = arrays.get("weights")
        if weights is None or weights.size != size:
            received = "none" if weights is None else str(weights.size)
            raise ShapeMismatch(f"Shard {index}: expected {size} weights. Received: {received}.")
        return arrays

    def write(self, state: State) -> None:
        """Replace the weights of all shards, and the optimizer variables that the state has."""
        self._cut.check(state)

        def call(index: int) -> None:
            weights, optimizer = self._cut.own(state, index)
            data = dump_arrays({"weights": weights, **{f"optimizer/{i}": a for i, a in optimizer.items()}})
            self._stubs[index].Write(_chunks(data), timeout=STATE_TIMEOUT_S)

        self._on_all(call)


def _again(call: Callable[[int], Any], index: int) -> Any:
    """Make a call, twice if its connection was lost, because connections of a suspended server may be dead."""
    try:
        return call(index)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return call(index)


def _records_of(index: int, part: Mapping[str, Array]) -> dict[str, Array]:
    """Return the records in the reply of a shard."""
    prefix = "records/"
    records = {name.removeprefix(prefix): array for name, array in part.items() if name.startswith(prefix)}
    if not records:
        raise ProtocolError(f"Shard {index}: expected its state with records. Received: none; it has no snapshots.")
    return records


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


def _gather(chunks: Iterable[pb.StateChunk], limit: int, begun: Callable[[], None]) -> bytes:
    data = io.BytesIO()  # returns its bytes without a copy
    for chunk in chunks:
        at = data.tell()
        if not at:
            begun()
        if chunk.total_bytes > limit:
            raise ProtocolError(f"Shard state: expected at most {limit} bytes. Received: {chunk.total_bytes}.")
        if chunk.offset != at or at + len(chunk.data) > chunk.total_bytes:
            raise ProtocolError(f"Shard state: expected byte {at}. Received: byte {chunk.offset}.")
        data.write(chunk.data)
    return data.getvalue()


def _chunks(data: bytes) -> Iterator[pb.StateChunk]:
    for offset in range(0, max(len(data), 1), CHUNK_BYTES):
        yield pb.StateChunk(offset=offset, total_bytes=len(data), data=data[offset : offset + CHUNK_BYTES])
