"""Job server of one real slot: a test sends the assignments, and reads the slot's messages and reports."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Mapping

import grpc

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import make_server, same_token

TOKEN = "secret-token"
DEADLINE_S = 120.0


class SlotServer(workers_pb2_grpc.WorkersServicer):
    """Service of a slot at ``address``, until it is stopped.

    Args:
        blobs: Artifacts by name.
    """

    def __init__(self, blobs: Mapping[str, bytes]) -> None:
        self._blobs = blobs
        self._to_send: queue.SimpleQueue[pb.Assignment | None] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[pb.SlotMessage | None] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[pb.NextRequest] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[pb.NextReply | None] = queue.SimpleQueue()
        self._sent = 0
        self._registered = threading.Event()
        self._server, self.address = make_server(
            "127.0.0.1:0", authenticate=lambda method, token: same_token(TOKEN, token)
        )
        workers_pb2_grpc.add_WorkersServicer_to_server(self, self._server)
        self._server.start()

    def Attend(self, messages, context):
        next(messages)
        self._registered.set()
        threading.Thread(target=self._receive, args=(messages,), daemon=True).start()
        yield pb.Assignment(welcome=pb.Welcome())
        while (assignment := self._to_send.get()) is not None:
            yield assignment

    def _receive(self, messages):
        with contextlib.suppress(grpc.RpcError):  # the slot has ended
            for message in messages:
                if message.WhichOneof("message") not in ("output", "spans", "heartbeat"):  # they come at any time
                    self._messages.put(message)
                if message.HasField("leaving"):
                    self._to_send.put(None)
        self._messages.put(None)

    def Next(self, request, context):
        self._requests.put(request)
        return self._replies.get(timeout=DEADLINE_S) or pb.NextReply()

    def Fetch(self, request, context):
        blob = self._blobs[request.sha256]
        ranges = [blob[r.offset : r.offset + r.length] for r in request.ranges] or [blob[request.offset :]]
        yield pb.FetchChunk(offset=request.offset, total_bytes=len(blob), data=b"".join(ranges))

    def wait_for_slot(self):
        """Wait until the slot has registered."""
        assert self._registered.wait(DEADLINE_S)

    def assign(self, **assignment):
        """Send an assignment to the slot."""
        self._sent += 1
        self._to_send.put(pb.Assignment(number=self._sent, **assignment))

    def message(self):
        """Wait for the slot's next message; None when its stream has ended."""
        return self._messages.get(timeout=DEADLINE_S)

    def request(self):
        """Wait for the worker's next report."""
        return self._requests.get(timeout=DEADLINE_S)

    def reply(self, reply):
        """Answer the oldest report that has no answer."""
        self._replies.put(reply)

    def start(self, fork_server, log, role, *options):
        """Start a slot with a fork server and return its process, which ends with its standard input."""
        arguments = ["--server", self.address, "--role", role, "--watch-stdin", *options]
        with log.open("a") as file:
            return fork_server.fork(arguments, role, {**os.environ, "NFDT_TOKEN": TOKEN}, file.fileno())

    def stop(self):
        self._to_send.put(None)
        self._replies.put(None)
        self._server.stop(None).wait()
