"""Connection of a slot to its server: registration, a stream that is reopened when it breaks, calls with retries.

A server that does not answer may have stopped, or be overloaded or cut off. The slot retries until its time limit.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from nfdt.core.errors import ServerUnreachable
from nfdt.core.host.machine import boot_id, find_gpus, versions
from nfdt.core.host.usage import UsageMeter
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import MESSAGE_BYTES
from nfdt.core.wire.chunks import split
from nfdt.core.wire.status import translated
from nfdt.core.work.patience import Patience
from nfdt.core.work.resend_queue import ResendQueue

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

PATIENCE_S = 90.0
GRACE_S = 30.0  # from the request to end a process until it ends in any case
REGISTERED = "is registered at"  # in the log of a slot, from which its launcher learns it too
NEXT_TIMEOUT_S = 60.0
HEARTBEAT_S = 2.0  # between two heartbeats, until the server asks for others
SLOWEST_BYTES_PER_S = 2**20  # of a link that carries a long report or answer
STACKS_CHARACTERS = 200_000
LEAST_S = 15.0  # shortest timeout of one call: a healthy server may take ten seconds to answer


def make_hello(
    name: str, role: str, *, address: str = "", resumes: bool = False, patience_s: float = 0.0, ring: str = ""
) -> pb.SlotHello:
    """Return the first message of a slot.

    Args:
        name: Name of the slot, unique at its server.
        role: ``"worker"`` or ``"shard"``.
        address: Host at which other machines reach the slot.
        resumes: Whether the slot reopens its stream when it breaks; otherwise the slot ends with its stream.
        patience_s: Time limit for reopening the stream.
        ring: The ring whose slot it is; "" for none.
    """
    gpus = find_gpus(os.environ) if role == "worker" else ()  # shards compute on the processor
    return pb.SlotHello(
        name=name,
        host=socket.gethostname(),
        pid=os.getpid(),
        role=role,
        address=address,
        versions=versions(),
        device=f"gpu:{','.join(gpus)}" if gpus else "cpu",
        boot_id=boot_id(),
        key=secrets.token_hex(16) if resumes else "",
        patience_s=patience_s,
        ring=ring,
    )


def describe_failure(
    job_id: str, error: BaseException, *, failed_in: str = "", unquotes_keys: bool = True
) -> pb.SlotFailed:
    """Return the message from which the client raises a slot's exception again.

    Args:
        job_id: The job.
        error: The exception.
        failed_in: Name of the rank whose code raised it; "" for the slot itself.
        unquotes_keys: Whether the message of a KeyError is its bare key. ``str()`` of a KeyError quotes the key, and
            the client would quote it once more.
    """
    bare = unquotes_keys and isinstance(error, KeyError) and len(error.args) == 1
    return pb.SlotFailed(
        job_id=job_id,
        exception_module=type(error).__module__,
        exception_type=type(error).__qualname__,
        message=str(error.args[0]) if bare else str(error),
        traceback="".join(traceback.format_exception(error)),
        failed_in=failed_in,
    )


def describe_threads() -> str:
    """Return where each thread of this process is, the main thread first, as Python prints tracebacks."""
    frames, main = sys._current_frames(), threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    named = [(thread.name, frames.get(thread.ident or 0)) for thread in threads]
    return "\n".join(f"{name}\n{''.join(traceback.format_stack(frame))}" for name, frame in named if frame is not None)


class SlotStream:
    """Exchanges messages and assignments with the server, over one stream, or several in turn if the hello has a key.

    Heartbeats are sent by the thread of gRPC that sends all messages, so that a slot that computes sends them as well.

    Args:
        stub: Stub of the Workers service.
        hello: The registration, see :func:`make_hello`.
        address: Address of the server, for error messages.
    """

    def __init__(self, stub: Any, hello: pb.SlotHello, address: str) -> None:
        self._stub, self._hello, self._address = stub, hello, address
        self._to_send: ResendQueue[pb.SlotMessage] = ResendQueue()
        self._received = 0
        self._registered = False
        self._every_s = HEARTBEAT_S
        self._registrations = 0  # at servers that did not know this slot
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._usage = UsageMeter()

    def send(self, **message: Any) -> None:
        """Send a message to the server."""
        self._to_send.put(self._message(**message))

    def _message(self, **message: Any) -> pb.SlotMessage:
        """Return a message with what this process uses, if that was sent a while ago."""
        if self._usage.due:
            gpus = [pb.Gpu(**vars(gpu)) for gpu in self._usage.gpus()]
            message["usage"] = pb.Usage(**self._usage.of_machine(), gpus=gpus)
        return pb.SlotMessage(received=self._received, **message)

    def sender(self) -> Callable[..., None]:
        """Return a :meth:`send` for assignments of the current server; it drops messages once another one is there.

        A restarted server may have assigned the same job again.
        """
        registration = self._registrations

        def send(**message: Any) -> None:
            with self._lock:
                # The lock keeps a new registration from clearing the queue between this check and the message.
                if registration == self._registrations:
                    self.send(**message)

        return send

    @property
    def closed(self) -> bool:
        """Whether this side has closed the stream."""
        return self._closed.is_set()

    def close(self) -> None:
        """Close the stream. A slot that can resume announces it, or the server would wait for its return."""
        self._closed.set()
        if self._hello.key:
            self.send(leaving=pb.SlotLeaving())
        self._to_send.end()

    def assignments(self) -> Iterator[pb.Assignment]:
        """Yield the server's assignments, each once, until it ends the stream.

        A server that does not know this slot any more counts as a release from the job.

        Raises:
            NfdtError: the server refuses this slot, or did not answer within the time limit.
        """
        patience = Patience(self._hello.patience_s, self._closed)
        while True:
            welcomed = threading.Event()
            try:
                with translated(self._address):
                    for assignment in self._stub.Attend(self._messages(welcomed), wait_for_ready=False):
                        patience.success()
                        yield from self._accept(assignment)
                        welcomed.set()
                return
            except ServerUnreachable as error:
                patience.again(error)
            finally:
                welcomed.set()

    def _messages(self, welcomed: threading.Event) -> Iterator[pb.SlotMessage]:
        hello = pb.SlotMessage(hello=self._hello, received=self._received)
        if not self._hello.key:
            welcomed.set()  # the server sends no welcome
        return itertools.chain([hello], self._after_welcome(welcomed, self._to_send.open()))

    def _after_welcome(self, welcomed: threading.Event, stream: int) -> Iterator[pb.SlotMessage]:
        """Yield the messages of a stream once its server has welcomed this slot.

        A restarted server must not receive messages that were meant for the one before it.
        """
        welcomed.wait()

        def heartbeat() -> pb.SlotMessage:
            return self._message(heartbeat=pb.SlotHeartbeat())

        yield from self._to_send.messages(stream, heartbeat, lambda: self._every_s)

    def _accept(self, assignment: pb.Assignment) -> Iterator[pb.Assignment]:
        if assignment.WhichOneof("assignment") == "welcome":
            if self._registered and not assignment.welcome.resumed:
                with self._lock:
                    self._registrations += 1
                    self._received = 0
                    self._to_send.clear()
                yield pb.Assignment(release=pb.Release())
            if not self._registered:
                logger.info("%s %s %s", self._hello.name, REGISTERED, self._address)
            self._registered = True
            self._to_send.acknowledge(assignment.received)
        elif assignment.HasField("heartbeat"):
            if self._every_s != (every_s := assignment.heartbeat.every_s or HEARTBEAT_S):
                self._every_s = every_s
                self._to_send.wake()
            self._to_send.acknowledge(assignment.received)
        elif assignment.number > self._received:
            self._received = assignment.number
            self._to_send.acknowledge(assignment.received)
            if assignment.HasField("describe_stacks"):
                self.send(stacks=pb.SlotStacks(text=describe_threads()[:STACKS_CHARACTERS]))
            else:
                yield assignment


class NextCalls:
    """Calls ``Workers.Next``. A call without an answer is repeated with the same number, and the server counts it once.

    Args:
        stub: Stub of the Workers service.
        job: The job's identifier, and this worker's token.
        address: Address of the server, for error messages.
        patience_s: Time limit for an unresponsive server.
        stopped: Set when the job is over.
    """

    def __init__(
        self, stub: Any, job: tuple[str, str], address: str, patience_s: float, stopped: threading.Event
    ) -> None:
        self._stub, self._job, self._address = stub, job, address
        self._patience_s, self._stopped = patience_s, stopped
        self._calls = 0

    def ask(self, request: pb.NextRequest) -> pb.NextReply:
        """Return the server's answer.

        Raises:
            NfdtError: the server refuses, or did not answer in time.
        """
        self._calls += 1
        request.call = self._calls
        return self._patiently(lambda limit_s: call_next(self._stub, self._job, self._address, request, limit_s))

    def take_rows(self, request: pb.TakeRowsRequest) -> pb.TakeRowsReply:
        """Return rows of the dataset that this worker runs; any thread may call.

        Raises:
            NfdtError: the server refuses, or did not answer in time.
        """
        request.job_id, request.job_token = self._job

        def call(limit_s: float) -> pb.TakeRowsReply:
            with translated(self._address):
                return self._stub.TakeRows(request, timeout=limit_s)

        return self._patiently(call)

    def _patiently(self, call: Callable[[float], Answer]) -> Answer:
        """Call, with a time limit in seconds for each attempt, until there is an answer."""
        patience, began = Patience(self._patience_s, self._stopped), time.monotonic()
        while True:
            try:
                return call(min(NEXT_TIMEOUT_S, max(patience.left_s, LEAST_S)))
            except ServerUnreachable as error:
                patience.again(error, began)


def call_next(
    stub: Any, job: tuple[str, str], address: str, request: pb.NextRequest, timeout_s: float = NEXT_TIMEOUT_S
) -> pb.NextReply:
    """Call ``Workers.Next`` once; for the arguments see :class:`NextCalls`.

    Raises:
        NfdtError: the server refuses, or did not answer in time.
    """
    request.job_id, request.job_token = job
    with translated(address):
        if (size := request.ByteSize()) <= MESSAGE_BYTES:
            reply = stub.Next(request, timeout=timeout_s)
        else:
            pieces, limit_s = _pieces(request.SerializeToString()), timeout_s + size / SLOWEST_BYTES_PER_S
            reply = stub.NextLong(pieces, timeout=limit_s)
        return _fetch_long(stub, job, request.worker, reply.long_reply) if reply.HasField("long_reply") else reply


def _pieces(data: bytes) -> Iterator[pb.FetchChunk]:
    for piece in split(len(data)):
        yield pb.FetchChunk(offset=piece.start, total_bytes=len(data), data=data[piece])


def _fetch_long(stub: Any, job: tuple[str, str], worker: str, announced: pb.LongReply) -> pb.NextReply:
    """Fetch an answer that is too long for a message."""
    job_id, token = job
    request = pb.FetchReplyRequest(job_id=job_id, worker=worker, job_token=token, number=announced.number)
    limit_s = NEXT_TIMEOUT_S + announced.total_bytes / SLOWEST_BYTES_PER_S
    data = b"".join(chunk.data for chunk in stub.FetchReply(request, timeout=limit_s))
    return pb.NextReply.FromString(data)
