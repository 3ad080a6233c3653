"""One worker's stream to one shard: requests out, answers in, a deadline on every wait, one reconnect."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from nfdt.core import errors
from nfdt.core.errors import NfdtError, ProtocolError, ServerUnreachable
from nfdt.core.wire.frames import Assembly, decode_frame, encode_frame, split
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, PULL, WEIGHTS, Frame
from nfdt.core.wire.status import translate

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


@dataclass(frozen=True)
class Answer:
    """The shard's answer; ``weights`` tells whether the request's buffer was filled."""

    header: Frame
    weights: bool


class _Stream:
    """One bidirectional call; its reader thread puts answers together while the caller waits."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._request: Request | None = None
        self.sent = self.received = 0
        open_call: Any = channel.stream_stream
        self._call = open_call(METHOD)(self._outgoing())
        threading.Thread(target=self._read, name="shard-answers", daemon=True).start()

    def ask(self, request: Request) -> None:
        self._request = request
        self._outbox.put(request.frames())

    def answer(self, timeout_s: float) -> Answer | Exception:
        """The answer, or what ended the stream.

        Raises:
            queue.Empty: nothing came in time.
        """
        return self._answers.get(timeout=max(timeout_s, 0.0))

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        while (frames := self._outbox.get()) is not None:
            for data in frames:
                self.sent += len(data)
                yield data

    def _read(self) -> None:
        incoming = self._incoming()
        try:
            for data in incoming:
                self._answers.put(self._assemble(data, incoming))
            self._answers.put(ProtocolError("The stream ended without an answer."))
        except Exception as error:  # whatever ends the reader is told to who waits
            self._answers.put(error)
        finally:
            self._outbox.put(None)

    def _incoming(self) -> Iterator[bytes]:
        for data in self._call:
            self.received += len(data)
            yield data

    def _assemble(self, data: bytes, incoming: Iterator[bytes]) -> Answer:
        header, payload = decode_frame(data)
        request = self._request
        if header.kind != WEIGHTS:
            return Answer(header, False)
        if request is None or header.total_bytes != request.weights.nbytes:
            wanted = request.weights.nbytes if request else 0
            raise ProtocolError(f"Answer: expected {wanted} bytes of weights. Received: {header.total_bytes}.")
        assembly = Assembly(request.weights)
        assembly.add(header.offset, payload)
        while not assembly.complete:
            chunk, payload = decode_frame(next(incoming, b""))
            assembly.add(chunk.offset, payload)
        return Answer(header, True)


class ShardLink:
    """Asks one shard, one request at a time.

    Args:
        address: For messages.
        channel: Open channel to it; closed with the link.
        timeout_s: Longest wait for one answer.
    """

    def __init__(self, address: str, channel: grpc.Channel, timeout_s: float) -> None:
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
        self._stream = self._stream or _Stream(self._channel)
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
            self._stream = _Stream(self._channel)
            self._stream.ask(self._request)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the stream and the channel; a wait in another thread ends with an error."""
        self._closed = True
        self._drop()
        self._channel.close()

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
