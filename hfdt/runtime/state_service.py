"""The Shard service of a ring, served by rank 0: it reads and writes state, and exchanges no gradients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

from hfdt.runtime.rank_step import RankStep
from hfdt.runtime.slot_connection import SlotConnection
from nfdt.core.arrays.safetensors_io import stream_parts
from nfdt.core.errors import ProtocolError, ShapeMismatch, UsageError
from nfdt.core.wire import shards_pb2 as pb
from nfdt.core.wire import shards_pb2_grpc
from nfdt.core.wire.channel import DATA_BYTES, join_address, make_server, same_token
from nfdt.core.wire.chunks import cut, payloads
from nfdt.core.wire.status import answering
from nfdt.core.wire.workers_pb2 import ShardAssignment
from nfdt.model.keras_internals.training import has_fixed_learning_rate
from nfdt.model.program.state import State, load_state, name_arrays

STOP_GRACE_S = 1.0
THREADS = 16
SPARE_BYTES, MAX_STATE_COPIES = 2**24, 64


class StateService(shards_pb2_grpc.ShardServicer):
    """Shard service of a ring. Written state reaches the other ranks with the next command, before the next step.

    Args:
        step: Model of rank 0; no step runs while the coordinator reads or writes.
        assignment: Assignment of the shard: its token and certificate.
        connection: Connection to the job server, which has this machine's address and says whether plain text is fine.

    Attributes:
        version: Number of updates.
    """

    def __init__(self, step: RankStep, assignment: ShardAssignment, connection: SlotConnection) -> None:
        self._step = step
        self._lock = threading.Lock()
        self._learning_rate: float | None = None
        self._state = b""
        self.version = 0
        self._server, self.address = make_server(
            join_address(connection.host, 0),
            authenticate=lambda method, received: same_token(assignment.job_token, received),
            cert=assignment.tls_cert or None,
            key=assignment.tls_key or None,
            insecure=connection.insecure,
            max_threads=THREADS,
            max_message_bytes=DATA_BYTES,
        )
        shards_pb2_grpc.add_ShardServicer_to_server(self, self._server)
        self._server.start()

    def pop_changes(self) -> tuple[float | None, bytes]:
        """Return the learning rate and the state (safetensors) that were set since the last call; None and b"": none.

        The next command takes them to the other ranks.
        """
        with self._lock:
            changes = self._learning_rate, self._state
            self._learning_rate, self._state = None, b""
            return changes

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop(STOP_GRACE_S).wait(2 * STOP_GRACE_S)

    @answering
    def Administer(self, request: pb.AdminRequest, context: Any) -> pb.AdminReply:
        """Set the learning rate or report statistics; flush and forget have no effect."""
        action = request.WhichOneof("action")
        if action == "learning_rate":
            if not has_fixed_learning_rate(self._step.optimizer):
                raise UsageError("Learning rate: expected a plain number in the optimizer. Received: a schedule.")
            with self._lock:
                self._learning_rate = request.learning_rate.value
        elif action not in ("flush", "forget", "statistics"):
            raise ProtocolError(f"Administer: expected an action that a ring knows. Received: {action}.")
        return pb.AdminReply(version=self.version, statistics_json=json.dumps(self._statistics()))

    def _statistics(self) -> dict[str, float]:
        """Return the number of updates, and the rate of the next one if the optimizer has one."""
        rate = self._step.learning_rate
        return {"version": self.version, **({} if rate is None else {"learning_rate": rate})}

    @answering
    def Read(self, request_iterator: Iterator[pb.ReadRequest], context: Any) -> Iterator[pb.StateChunk]:
        """Send the state as safetensors, all of it."""
        request = next(request_iterator)
        state = self._step.read()
        named = name_arrays(state.weights, {} if request.weights_only else state.optimizer)
        for chunk, data in cut(*stream_parts(named)):
            chunk.data = bytes(data)
            yield chunk

    @answering
    def Write(self, request_iterator: Iterator[pb.StateChunk], context: Any) -> pb.AdminReply:
        """Replace the weights and, where given, the optimizer variables."""
        state, data = self._receive(request_iterator)
        self._step.load(state)  # at once, as the coordinator may read before the next command
        with self._lock:
            self._state = data
        return pb.AdminReply(version=self.version)

    def _receive(self, chunks: Iterator[pb.StateChunk]) -> tuple[State, bytes]:
        size = self._step.layout.size
        most = SPARE_BYTES + 4 * size * MAX_STATE_COPIES
        data = b"".join(payloads(chunks, most, "Write"))
        state = load_state(data)
        if state.weights.size != size:
            raise ShapeMismatch(f"State: expected {size} weights. Received: {state.weights.size}.")
        return state, data
