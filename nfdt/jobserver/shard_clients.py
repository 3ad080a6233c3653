"""Clients of a job's shards: flush, learning rate, reading and writing their state."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.arrays.safetensors_io import load_arrays, stream_parts
from nfdt.core.host.machine import boot_id
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.sharding.plan import StateCut
from nfdt.core.sharding.records import closed_round_of, part_of_records
from nfdt.core.wire import shards_pb2 as pb
from nfdt.core.wire import shards_pb2_grpc
from nfdt.core.wire.channel import DATA_BYTES, is_loopback, open_channel, split_address
from nfdt.core.wire.chunks import cut, encode_chunk
from nfdt.core.wire.passed_files import PassedFiles
from nfdt.core.wire.status import translated
from nfdt.core.work.tasks import TaskNumbers
from nfdt.jobserver.incoming_state import IncomingState, Place, Rest, StateFile
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State, name_arrays

SHARD_SERVICE = "nfdt.v1.Shard"
CALL_TIMEOUT_S = 60.0
STATE_TIMEOUT_S = 600.0
MAX_STATE_FACTOR = 16  # limit of a shard's state as a multiple of its weights, at least MIN_STATE_BYTES
MIN_STATE_BYTES = 2**26
MAX_SNAPSHOT_FACTOR = 1024  # limit with records: update rules may have a few vectors for each worker


@dataclass(frozen=True)
class ShardSnapshot:
    """Copy of all shards of a job, each at one moment; shards can be started again from it.

    Attributes:
        state: Artifact of the state.
        records: Artifact of the records of all shards; see :mod:`nfdt.core.sharding.records`.
        tasks: For each shard, the tasks whose updates it contains; none in a job with rounds.
        closed_rounds: For each shard, its newest closed round; 0 in a job without rounds.
    """

    state: str
    records: str
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

    def keep(self, kept: bool) -> None:
        """Keep the present weights for workers that evaluate them later, or no more of those kept before."""

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        """Drop the backups of a lost worker and refuse its pushes; return those of its tasks that each has applied."""

    def statistics(self) -> list[Mapping[str, Any]]:
        """Return the counts of each shard, in order."""

    def save(self, artifacts: ArtifactStore, rest: Rest, *, weights_only: bool = False) -> str:
        """Store the weights and optimizer variables of all shards with the rest of a state; return the artifact."""

    def snapshot(self, copied: Callable[[], None], artifacts: ArtifactStore, rest: Rest) -> ShardSnapshot:
        """Store the state and records of all shards.

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


class _Reading:
    """Call that reads the state of one shard: the header, then the arrays.

    Args:
        method: The method ``Read`` of the shard.
        request: What to read.
        most: Largest size, in bytes.
        begun: Called once the first chunk has arrived.

    Attributes:
        state: The state on its way; its header has arrived.
    """

    def __init__(self, method: Any, request: pb.ReadRequest, most: int, begun: Callable[[], object]) -> None:
        self._requests: queue.SimpleQueue[pb.ReadRequest | None] = queue.SimpleQueue()
        self._requests.put(request)
        self._call = method(iter(self._requests.get, None), timeout=STATE_TIMEOUT_S)
        try:
            self.state = IncomingState(self._call, most, begun)
        except BaseException:
            self.close()
            raise

    def write(self, places: Mapping[str, Place], files: Sequence[int], passed: str) -> None:
        """Write the arrays to their places; a shard on this machine does so itself.

        Args:
            places: For each array, one of ``files`` and the position in it.
            files: Descriptors of the files.
            passed: Name under which they are handed out; "": they are not.
        """
        found = [pb.StatePlace(name=name, file=files.index(file), offset=at) for name, (file, at) in places.items()]
        self._requests.put(pb.ReadRequest(files=passed, boot_id=boot_id(), places=found if passed else ()))
        self.state.write(places, written=bool(passed))

    def close(self) -> None:
        """End the call."""
        self._requests.put(None)
        self._call.cancel()


class GrpcShardClients:
    """Client that calls all shards of one job in parallel, each with a deadline; a :class:`ShardClients`.

    Args:
        addresses: Addresses of the shards, in order.
        layout: Layout of all trainable variables.
        token: Key of the job.
        owners: Trainable variable to which each optimizer variable belongs, -1 for none; None: unknown.
        made: Tables, by index, that shards make, and that a state of a client lacks.
        authority: PEM certificate of the authority of those shards that are not on loopback; None: plain text.
        insecure: Whether plain text may leave this machine.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        layout: ParameterLayout,
        token: str,
        *,
        owners: Sequence[int] | None = None,
        made: Collection[int] = (),
        authority: bytes | None = None,
        insecure: bool = False,
    ) -> None:
        self._addresses = list(addresses)
        self._cut = StateCut(layout, len(addresses), owners, made)
        self._channels = [_open(address, token, authority, insecure) for address in addresses]
        self._stubs: list[Any] = [shards_pb2_grpc.ShardStub(channel) for channel in self._channels]
        write, reply = f"/{SHARD_SERVICE}/Write", pb.AdminReply.FromString
        self._writes = [channel.stream_unary(write, None, reply) for channel in self._channels]  # bytes
        self._pool = ThreadPoolExecutor(len(self._stubs), thread_name_prefix="shards")

    def close(self) -> None:
        """Close the channels; running calls fail."""
        for channel in self._channels:
            channel.close()
        self._pool.shutdown(wait=False)

    def _on_all(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self._pool.map(partial(self._on_one, call), range(len(self._stubs))))

    def _on_one(self, call: Callable[[int], Any], index: int) -> Any:
        with translated(self._name(index)):
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

    def keep(self, kept: bool) -> None:
        """Keep the present weights for workers that evaluate them later, or no more of those kept before."""
        self._administer(pb.AdminRequest(keep=pb.KeepWeights(kept=kept)))

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        """Drop the backups of a lost worker and refuse its pushes; return those of its tasks that each has applied."""
        replies = self._administer(pb.AdminRequest(forget=pb.ForgetWorker(worker=worker, tasks=tasks)))
        return [frozenset(reply.applied) for reply in replies]

    def statistics(self) -> list[Mapping[str, Any]]:
        """Return the counts of each shard, in order."""
        replies = self._administer(pb.AdminRequest(statistics=pb.ShardStatistics()))
        return [json.loads(reply.statistics_json or "{}") for reply in replies]

    def save(self, artifacts: ArtifactStore, rest: Rest, *, weights_only: bool = False) -> str:
        """Store the joined state of all shards, which hold no untrained state, with the rest; return the artifact.

        Raises:
            NfdtError: A shard does not answer, its reply has another size, or the state cannot be stored.
        """
        request = pb.ReadRequest(weights_only=weights_only)
        with self._reading(request) as parts:
            state = self._state_file(parts, rest)
            with artifacts.create(state.size) as (new,):
                self._receive(parts, {new.file: state})
        return new.name

    def snapshot(self, copied: Callable[[], None], artifacts: ArtifactStore, rest: Rest) -> ShardSnapshot:
        """Store the state and records of all shards; see :class:`ShardClients`.

        Raises:
            NfdtError: A shard does not answer, or its reply has another size or no records.
        """
        copies = _Countdown(range(len(self._stubs)), copied)
        with self._reading(pb.ReadRequest(records=True), copies.count) as parts:
            state, records = self._state_file(parts, rest), StateFile.of_records([part.state.arrays for part in parts])
            with artifacts.create(state.size, records.size) as (new, others):
                self._receive(parts, {new.file: state, others.file: records})
        found = load_arrays(artifacts.path(others.name))
        each = [part_of_records(found, index) for index in range(len(parts))]
        tasks = tuple(TaskNumbers(own.get("tasks", ())) for own in each)
        return ShardSnapshot(new.name, others.name, tasks, tuple(map(closed_round_of, each)))

    @contextmanager
    def _reading(
        self, request: pb.ReadRequest, begun: Callable[[int], object] = lambda index: None
    ) -> Iterator[list[_Reading]]:
        """Yield the calls that read the state of each shard, once all headers have arrived.

        ``begun`` is called with each shard's number once its first chunk has arrived, or the call has failed.
        """
        factor = MAX_SNAPSHOT_FACTOR if request.records else MAX_STATE_FACTOR
        calls: dict[int, _Reading] = {}

        def read(index: int) -> None:
            most = max(MIN_STATE_BYTES, factor * 4 * self._cut.size(index))
            then = partial(begun, index)

            def call(index: int) -> _Reading:
                return _Reading(self._stubs[index].Read, request, most, then)

            try:
                with translated(self._name(index)):
                    # The second copy of a shard would be taken later than those of the others.
                    calls[index] = call(index) if request.records else _again(call, index)
            finally:
                then()

        try:
            self._at_once(read)
            yield [calls[index] for index in range(len(self._stubs))]
        finally:
            for call in calls.values():
                call.close()

    def _state_file(self, parts: Sequence[_Reading], rest: Rest) -> StateFile:
        arrays = [part.state.arrays for part in parts]
        return StateFile.of_state(self._cut.table(arrays), arrays, rest.arrays())

    def _receive(self, parts: Sequence[_Reading], files: Mapping[int, StateFile]) -> None:
        """Let all shards write to these files, given by their descriptors."""
        places: list[dict[str, Place]] = [{} for _ in parts]
        for file, state in files.items():
            for own, more in zip(places, state.begin(file), strict=True):
                own.update(more)

        def receive(index: int) -> None:
            with translated(self._name(index)):
                parts[index].write(places[index], list(files), passed.name if passed else "")

        passed: PassedFiles | None = None
        with contextlib.suppress(OSError, RuntimeError):  # then the bytes are sent
            passed = PassedFiles(list(files))
        try:
            self._at_once(receive)
        finally:
            if passed is not None:
                passed.withdraw()

    def _at_once(self, call: Callable[[int], None]) -> None:
        """Call with the number of each shard, on threads of their own: other calls need not wait."""
        with ThreadPoolExecutor(len(self._stubs), thread_name_prefix="states") as pool:
            list(pool.map(call, range(len(self._stubs))))

    def _name(self, index: int) -> str:
        return f"shard {index} at {self._addresses[index]}"

    def write(self, state: State) -> None:
        """Replace the weights of all shards, and the optimizer variables that the state has."""
        self._cut.check(state)

        def call(index: int) -> None:
            weights, optimizer = self._cut.own(state, index)
            chunks = cut(*stream_parts(name_arrays(weights, optimizer)))
            self._writes[index]((encode_chunk(*chunk) for chunk in chunks), timeout=STATE_TIMEOUT_S)

        self._on_all(call)


def _again(call: Callable[[int], Any], index: int) -> Any:
    """Make a call, twice if its connection was lost, because connections of a suspended server may be dead."""
    try:
        return call(index)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return call(index)


def connect_shards(addresses: Sequence[str], manifest: Manifest, token: str, **security: Any) -> ShardClients:
    """Return the client of the shards that hold a program; ``security`` as of :class:`GrpcShardClients`."""
    owners, made = manifest.optimizer_owners, manifest.made
    return GrpcShardClients(addresses, manifest.layout, token, owners=owners, made=made, **security)


def _open(address: str, token: str, authority: bytes | None, insecure: bool) -> grpc.Channel:
    trusted = None if is_loopback(split_address(address)[0]) else authority
    return open_channel(address, token, ca_file=trusted, insecure=insecure, max_message_bytes=DATA_BYTES)
