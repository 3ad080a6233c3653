"""One worker's stream to one shard: requests out, answers in, a deadline on every wait, one reconnect."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from nfdt.core import errors
from nfdt.core.errors import NfdtError, ProtocolError, ServerUnreachable
from nfdt.core.wire.frames import Assembly, decode_frame, encode_frame, split
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, PULL, PUSH, WEIGHTS, Frame
from nfdt.core.wire.status import translate
from nfdt.transport.base import Vector
from nfdt.transport.shared_memory import Offer

logger = logging.getLogger(__name__)

METHOD = "/nfdt.v1.Shard/Exchange"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class Request:
    """One push or pull: its header, the gradient's bytes (empty for a pull), and where weights go."""

    header: Frame
    payload: memoryview
    weights: memoryview

    def frames(self) -> Iterator[bytes]:
        """The request as frames; each is made when it is sent."""
        if self.header.kind == PULL:
            yield encode_frame(self.header)
            return
        total = self.payload.nbytes
        for part in split(total):
            first = self.header if not part.start else Frame(kind=self.header.kind, sequence=self.header.sequence)
            frame = Frame()
            frame.CopyFrom(first)
            frame.total_bytes, frame.offset = total, part.start
            yield encode_frame(frame, self.payload[part])

    def shared_frame(self) -> bytes:
        """The push as one frame, its gradient being in shared memory."""
        frame = Frame()
        frame.CopyFrom(self.header)
        frame.total_bytes, frame.shared = self.payload.nbytes, True
        return encode_frame(frame)


@dataclass(frozen=True)
class Answer:
    """The shard's answer.

    Attributes:
        header: What it says.
        weights: Whether weights came: in the request's buffer, or in ``shared``.
        shared: Read-only view of the weights in shared memory; stays as it is until the next request.
    """

    header: Frame
    weights: bool
    shared: Vector | None = None


class _Stream:
    """One bidirectional call; its reader thread puts answers together while the caller waits.

    Where it offers shared memory, the offer goes out before the first request, which travels on the stream as the
    shard has not answered yet; requests after an offer that was accepted put their gradient in the segment.
    """

    def __init__(self, channel: grpc.Channel, offer: Offer | None) -> None:
        self._offer, self._offered = offer, False
        self._outbox: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._request: Request | None = None
        self.sent = self.received = 0
        open_call: Any = channel.stream_stream
        self._call = open_call(METHOD)(self._outgoing())
        threading.Thread(target=self._read, name="shard-answers", daemon=True).start()

    def ask(self, request: Request) -> None:
        self._request = request
        self._outbox.put(self._frames(request))

    def answer(self, timeout_s: float) -> Answer | Exception:
        """The answer, or what ended the stream.

        Raises:
            queue.Empty: nothing came in time.
        """
        return self._answers.get(timeout=max(timeout_s, 0.0))

    def close(self) -> None:
        if self._offer:
            self._offer.withdraw()  # first: who waits for the call sees no name any more
        self._outbox.put(None)
        self._call.cancel()

    def _frames(self, request: Request) -> Iterator[bytes]:
        offer = self._offer
        if offer and offer.mapped and request.header.kind == PUSH:
            np.copyto(offer.segment.gradient, np.frombuffer(request.payload, np.float32))
            self.sent += request.payload.nbytes
            return iter((request.shared_frame(),))
        if offer and not self._offered:
            self._offered = True
            return itertools.chain((encode_frame(offer.frame(request.header.worker)),), request.frames())
        return request.frames()

    def _outgoing(self) -> Iterator[bytes]:
        while (frames := self._outbox.get()) is not None:
            for data in frames:
                self.sent += len(data)
                yield data

    def _read(self) -> None:
        incoming = self._incoming()
        try:
            for data in incoming:
                header, payload = decode_frame(data)
                if header.kind == ACKNOWLEDGE and not header.sequence:
                    self._settle(header)
                else:
                    self._answers.put(self._assemble(header, payload, incoming))
            self._answers.put(ProtocolError("The stream ended without an answer."))
        except Exception as error:  # whatever ends the reader is told to who waits
            self._answers.put(error)
        finally:
            self._outbox.put(None)

    def _incoming(self) -> Iterator[bytes]:
        for data in self._call:
            self.received += len(data)
            yield data

    def _settle(self, answer: Frame) -> None:
        """The shard has answered the offer."""
        if self._offer:
            self._offer.settle(mapped=answer.applied)
            if not answer.applied:
                logger.info("The shard does not share memory. %s", answer.error)

    def _assemble(self, header: Frame, payload: memoryview, incoming: Iterator[bytes]) -> Answer:
        request = self._request
        if header.kind != WEIGHTS:
            return Answer(header, False)
        if request is None or header.total_bytes != request.weights.nbytes:
            wanted = request.weights.nbytes if request else 0
            raise ProtocolError(f"Answer: expected {wanted} bytes of weights. Received: {header.total_bytes}.")
        if header.shared:
            return Answer(header, True, self._shared_weights())
        assembly = Assembly(request.weights)
        assembly.add(header.offset, payload)
        while not assembly.complete:
            chunk, payload = decode_frame(next(incoming, b""))
            assembly.add(chunk.offset, payload)
        return Answer(header, True)

    def _shared_weights(self) -> Vector:
        if self._offer is None or not self._offer.mapped:
            raise ProtocolError("Answer: expected weights on the stream, as no memory is shared. Received: none.")
        view = self._offer.segment.weights.view()
        view.flags.writeable = False
        self.received += view.nbytes
        return view


class ShardLink:
    """Asks one shard, one request at a time.

    Args:
        address: For messages.
        channel: Open channel to it; closed with the link.
        timeout_s: Longest wait for one answer.
        share_memory: Offer memory to a shard on this machine.
    """

    def __init__(self, address: str, channel: grpc.Channel, timeout_s: float, *, share_memory: bool = False) -> None:
        self._share_memory = share_memory
        self._address = address
        self._channel = channel
        self._timeout_s = timeout_s
        self._stream: _Stream | None = None
        self._request: Request | None = None
        self._asked_at = 0.0
        self._closed_bytes = (0, 0)
        self._closed = False

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """(sent, received) so far."""
        sent, received = self._closed_bytes
        stream = self._stream
        return (sent + stream.sent, received + stream.received) if stream else (sent, received)

    def ask(self, request: Request) -> None:
        """Send a request; its answer is fetched with :meth:`wait`."""
        self._request = request
        self._asked_at = time.monotonic()
        self._stream = self._stream or self._open(request)
        self._stream.ask(request)

    def wait(self) -> Answer:
        """The answer to the request; a stream that breaks is opened once more and the request sent again.

        Raises:
            ServerUnreachable: no answer in time, or the shard is gone.
            NfdtError: what the shard answered.
        """
        for attempt in (1, 2):
            found = self._next()
            if isinstance(found, Answer):
                return self._checked(found)
            self._drop()
            if self._closed or attempt == 2 or not self._may_retry(found):
                raise self._explained(found) from found
            assert self._request is not None
            self._stream = self._open(self._request)
            self._stream.ask(self._request)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the stream and the channel; a wait in another thread ends with an error."""
        self._closed = True
        self._drop()
        self._channel.close()

    def _open(self, request: Request) -> _Stream:
        """A new stream, and memory of its own: an old one's may still be in use at the shard."""
        offer = None
        if self._share_memory and request.weights.nbytes:
            try:
                offer = Offer(request.weights.nbytes)
            except OSError as error:
                logger.info("No memory to share with shard %s, its stream carries all bytes: %s", self._address, error)
        return _Stream(self._channel, offer)

    def _next(self) -> Answer | Exception:
        stream = self._stream
        if stream is None:
            return ServerUnreachable(f"Shard {self._address}: the connection was closed while it was used.")
        try:
            return stream.answer(self._asked_at + self._timeout_s - time.monotonic())
        except queue.Empty:
            self._drop()
            raise ServerUnreachable(
                f"Shard {self._address} did not answer within {self._timeout_s:g} s. It hangs or is overloaded; "
                "look at its log."
            ) from None

    def _checked(self, answer: Answer) -> Answer:
        header = answer.header
        if header.kind == ERROR:
            self._drop()
            name, _, text = header.error.partition(": ")
            kind = getattr(errors, name, None)
            known = isinstance(kind, type) and issubclass(kind, NfdtError)
            raise (kind if known else ProtocolError)(f"Shard {self._address}: {text or header.error}")  # type: ignore[misc]
        wanted = self._request.header.sequence if self._request else 0
        if header.sequence != wanted or header.kind not in (WEIGHTS, ACKNOWLEDGE):
            raise ProtocolError(
                f"Shard {self._address}: expected the answer to request {wanted}. Received: kind {header.kind}, "
                f"request {header.sequence}."
            )
        return answer

    @staticmethod
    def _may_retry(error: Exception) -> bool:
        return isinstance(error, grpc.RpcError) and error.code() in _LOST

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, grpc.RpcError):
            return translate(error, f"shard {self._address}")
        return ProtocolError(f"Shard {self._address}: {error}") if isinstance(error, ProtocolError) else error

    def _drop(self) -> None:
        stream, moved = self._stream, self.bytes_moved
        if stream:
            self._stream, self._closed_bytes = None, moved
            stream.close()
