"""One shard as a gRPC server: the Shard service on a store."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from nfdt.codecs import make_encoders
from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import Pieces, arrange, contents, write_all
from nfdt.core.errors import ProtocolError, Refused, UsageError
from nfdt.core.host.machine import boot_id
from nfdt.core.sharding import ShardPlan, make_plan
from nfdt.core.sharding.records import to_arrays
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.wire.channel import DATA_BYTES, make_server, same_token, token_of
from nfdt.core.wire.chunks import cut, encode_chunk, spooled
from nfdt.core.wire.connection import server_tls
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.job_token import worker_of
from nfdt.core.wire.passed_files import fetch_files
from nfdt.core.wire.shards_pb2 import AdminReply, AdminRequest, OpenReply, OpenRequest, ReadRequest, StateChunk
from nfdt.core.wire.status import answering
from nfdt.core.work.spans import SpanRing
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State, load_state, name_arrays
from nfdt.shard.buffers import BufferPool
from nfdt.shard.building import KeptEngine, Store, build_store
from nfdt.shard.exchange import Terms, WorkerExchange
from nfdt.shard.held_state import KeptWeights
from nfdt.shard.listener import ShardListener

SERVICE = "nfdt.v1.Shard"
OPEN = f"/{SERVICE}/Open"
STOP_GRACE_S = 1.0
SPARE_CALLS = 16
MAX_STATE_COPIES = 64


class ShardServicer:
    """Shard service on a store; its chunks are sent as bytes.

    Args:
        store: Store of the shard.
        plan: Part of the model on this shard.
        listener: Listener for the streams of pushes and pulls.
        key: Key of the job.
        kept: Weights that are kept from the end of an epoch.
    """

    def __init__(self, store: Store, plan: ShardPlan, listener: ShardListener, key: str, kept: KeptWeights) -> None:
        self._store, self._plan, self._listener, self._key, self._kept = store, plan, listener, key, kept

    @answering
    def open(self, request: OpenRequest, context: grpc.ServicerContext) -> OpenReply:
        """Issue a ticket for the port of pushes and pulls, valid for the worker whose token came with the call."""
        worker = worker_of(self._key, token_of(context.invocation_metadata()))
        assert worker is not None, "the call was admitted"
        return OpenReply(port=self._listener.port, ticket=self._listener.ticket(worker))

    @answering
    def administer(self, request: AdminRequest, context: grpc.ServicerContext) -> AdminReply:
        """Flush, set the learning rate, report statistics, keep weights, or remove a worker that left."""
        action, applied = request.WhichOneof("action"), list[int]()
        if action == "flush":
            self._store.flush()
        elif action == "learning_rate":
            self._store.set_learning_rate(request.learning_rate.value)
        elif action == "keep":
            self._kept.keep(request.keep.kept)
        elif action == "forget":
            applied = self._store.forget(request.forget.worker, request.forget.tasks)
        elif action != "statistics":
            raise ProtocolError(f"Administer: expected one known action. Received: {action}.")
        statistics = json.dumps(self._store.statistics())
        return AdminReply(version=self._store.version, statistics_json=statistics, applied=applied)

    @answering
    def read(self, requests: Iterator[ReadRequest], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send the shard's state as safetensors, consistent at one moment, which is before the first chunk.

        What follows the header is written to files of this machine if the second request has some.
        """
        request = next(requests)
        if request.records and request.weights_only:
            raise UsageError("Read: expected a request for records, or for weights only. Received: one for both.")
        held = self._store.hold(records=request.records, weights_only=request.weights_only)
        try:
            records = {f"records/{name}": array for name, array in to_arrays(held.records).items()}
            header, arrays = arrange({**name_arrays(held.weights, held.optimizer), **records})
            size = len(header) + sum(pieces.entry.nbytes for pieces in arrays.values())
            for chunk, data in cut(size, [header]):
                yield encode_chunk(chunk, data)
            wanted = next(requests, ReadRequest())
            if wanted.files and _write_to_files(wanted, arrays):
                yield encode_chunk(StateChunk(offset=len(header), total_bytes=len(header)))
                return
            parts = (part for pieces in arrays.values() for part in contents(pieces))
            for chunk, data in cut(size, parts, at=len(header)):
                yield encode_chunk(chunk, data)
        finally:
            held.release()

    @answering
    def write(self, requests: Iterator[StateChunk], context: grpc.ServicerContext) -> AdminReply:
        """Replace the weights (of the shard, or the whole model) and, where given, the optimizer variables."""
        most = 2**24 + 4 * self._plan.model_size * MAX_STATE_COPIES
        state = load_state(spooled(requests, most, "Write"))
        version = self._store.write(self._plan.own(state.weights), state.optimizer)
        return AdminReply(version=version)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return all methods, for ``grpc.Server.add_generic_rpc_handlers``."""
        answer, opened = AdminReply.SerializeToString, OpenReply.SerializeToString
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Open": grpc.unary_unary_rpc_method_handler(self.open, OpenRequest.FromString, opened),
                "Administer": grpc.unary_unary_rpc_method_handler(self.administer, AdminRequest.FromString, answer),
                "Read": grpc.stream_stream_rpc_method_handler(self.read, ReadRequest.FromString),
                "Write": grpc.stream_unary_rpc_method_handler(self.write, StateChunk.FromString, answer),
            },
        )


def _write_to_files(wanted: ReadRequest, arrays: Mapping[str, Pieces]) -> bool:
    """Write arrays to their places in files that the caller hands out; return whether that was possible.

    Raises:
        ProtocolError: a place lies outside its file.
    """
    if wanted.boot_id != boot_id():
        return False
    try:
        files = fetch_files(wanted.files)
    except Refused:
        return False
    try:
        sizes = [os.fstat(file).st_size for file in files]
        for place in wanted.places:
            pieces = arrays.get(place.name)
            if pieces is None or place.file >= len(files) or place.offset + pieces.entry.nbytes > sizes[place.file]:
                raise ProtocolError(
                    f"Read: expected places of this state's arrays in files of {sizes} bytes. Received: "
                    f"{place.name[:80]!r} at {place.offset} of file {place.file}."
                )
            at = place.offset
            for part in contents(pieces):
                write_all(files[place.file], part, at)
                at += len(part)
    finally:
        for file in files:
            os.close(file)
    return True


@dataclass
class RunningShard:
    """Running shard; ``address`` is ``host:port``."""

    address: str
    store: Store
    _server: grpc.Server
    _listener: ShardListener
    _stopped: threading.Event = field(default_factory=threading.Event)

    def stop(self, grace_s: float = STOP_GRACE_S) -> bool:
        """Stop serving; running calls get ``grace_s`` seconds. Waits for the end; can be called twice.

        Returns:
            Whether all calls have ended: none can still change the store.
        """
        pushed = self._listener.stop(grace_s)
        called = self._server.stop(grace_s).wait(grace_s + STOP_GRACE_S)
        self._stopped.set()
        return pushed and called

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the shard is stopped; return False if ``timeout_s`` passed first."""
        return self._stopped.wait(timeout_s)


def start_shard(
    manifest: Manifest,
    state: State,
    algorithm: AlgorithmSpec,
    index: int,
    shards: int,
    *,
    workers: int,
    token: str,
    host: str = "127.0.0.1",
    custom_objects: Mapping[str, Any] | None = None,
    records: Mapping[str, Array] | None = None,
    kept: KeptEngine | None = None,
    spans: SpanRing | None = None,
    stored: Callable[[str], State] | None = None,
    leased: bool = True,
    **security: Any,
) -> RunningShard:
    """Build shard ``index`` of ``shards`` of a program and serve it on a free port of ``host``.

    Args:
        manifest: The program's manifest.
        state: State of the whole model to start from.
        algorithm: Chooses the update rule, the number of gradients per update, and the overlap of a worker's pushes.
        index: Index of this shard, below :func:`nfdt.core.sharding.count_shards`.
        shards: Number of shards as given in the job's specification.
        workers: Number of workers of the job; sizes the thread pool and softsync's merge.
        token: Key of the job: administration requires it, and workers present tokens derived from it.
        host: Interface to listen on.
        custom_objects: The user's own classes, for code jobs.
        records: Records of all shards at the moment of ``state``, to continue from; see
            :mod:`nfdt.core.sharding.records`.
        kept: As for :func:`nfdt.shard.building.build_store`.
        spans: Takes the times of pushes.
        stored: As for :func:`nfdt.shard.building.build_store`.
        leased: Whether pushes must present the tickets of tasks that a job server has leased. False for shards that
            serve without one, as in benchmarks.
        **security: ``cert``, ``key``, ``client_ca``, ``insecure`` of :func:`nfdt.core.wire.channel.make_server`.

    Raises:
        UsageError: the optimizer cannot be built or partitioned.
        ProtocolError: the records belong to another number of shards.
        ShapeMismatch: the records belong to another program or rule.
        Refused: ``host`` is not loopback, and neither TLS nor ``insecure`` is given.
    """
    plan = make_plan(manifest, index, shards)
    options: dict[str, Any] = {"custom_objects": custom_objects, "records": records, "kept": kept, "spans": spans}
    store = build_store(manifest, state, algorithm, index, shards, workers=workers, stored=stored, **options)
    server, address = make_server(
        f"{host}:0",
        authenticate=lambda method, received: _admits(token, method, received),
        max_threads=2 * workers + SPARE_CALLS,
        max_message_bytes=DATA_BYTES,
        **security,
    )
    buffers, encoders = BufferPool(store.size), make_encoders(algorithm.top_k)
    terms, kept_weights = Terms.of(algorithm, workers, token if leased else ""), KeptWeights(store)

    def serve(stream: FrameStream, worker: str) -> None:
        WorkerExchange(store, buffers, encoders, terms, worker, kept_weights).serve(stream)

    cert, key, client_ca = (security.get(name) for name in ("cert", "key", "client_ca"))
    listener = ShardListener(serve, host, 2 * workers + SPARE_CALLS, server_tls(cert, key, client_ca) if cert else None)
    running = RunningShard(address, store, server, listener)
    servicer = ShardServicer(store, plan, listener, token, kept_weights)
    server.add_generic_rpc_handlers((servicer.handler(),))
    server.start()
    return running


def _admits(key: str, method: str, token: str) -> bool:
    """Return whether a token admits to a method: a worker's to its stream, the job's key to all others."""
    return worker_of(key, token) is not None if method == OPEN else same_token(key, token)
