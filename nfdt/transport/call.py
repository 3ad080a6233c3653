"""One call of a worker to one shard: requests out as frames, answers put together, in the order of the requests."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np

from nfdt.codecs import find_decoder
from nfdt.codecs.base import Payload
from nfdt.core.errors import ProtocolError
from nfdt.core.wire.frames import Assembly, decode_frame, encode_frame, split
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, PULL, PUSH, WEIGHTS, Frame
from nfdt.transport.base import Vector
from nfdt.transport.emulated_link import EmulatedLink
from nfdt.transport.shared_memory import Offer

logger = logging.getLogger(__name__)

METHOD = "/nfdt.v1.Shard/Exchange"


@dataclass(frozen=True)
class Request:
    """One push or pull: its header, the gradient's bytes (empty for a pull), and where all weights go."""

    header: Frame
    payload: memoryview
    weights: memoryview
    asked_at: float = field(default_factory=time.monotonic)

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
        weights: Whether weights came: in the request's buffer, in ``shared``, or as a ``difference``.
        shared: Read-only view of the weights in shared memory; how long it stays as it is, says ``Pulled``.
        difference: To the weights of an earlier answer, in the codec that the header names; kept as long as ``shared``.
        arrived_at: On the monotonic clock.
    """

    header: Frame
    weights: bool
    shared: Vector | None = None
    difference: Payload | None = None
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def payload_bytes(self) -> int:
        """How many bytes of weights or difference came."""
        return self.header.total_bytes if self.weights else 0


class ShardCall:
    """One bidirectional call; its reader thread puts answers together while the caller waits.

    Where it offers shared memory, the offer goes out before the first request, which travels on the stream as the
    shard has not answered yet; requests after an offer that was accepted put their gradient in the segment. Both sides
    find a request's areas there by its sequence number.
    """

    def __init__(self, channel: grpc.Channel, offer: Offer | None, emulated: EmulatedLink | None = None) -> None:
        self._offer, self._offered = offer, False
        self._emulated = emulated
        self._on_the_way: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Iterator[bytes] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._requests: deque[Request] = deque()
        self.sent = self.received = 0
        open_call: Any = channel.stream_stream
        self._call = open_call(METHOD)(self._outgoing())
        threading.Thread(target=self._read, name="shard-answers", daemon=True).start()
        if emulated:
            threading.Thread(target=self._delay, args=(emulated,), name="emulated-link", daemon=True).start()

    def ask(self, request: Request) -> None:
        """Send a request."""
        self._requests.append(request)
        frames = self._frames(request)
        self._outbox.put(_delayed(frames, request, self._emulated) if self._emulated else frames)

    @property
    def arrived(self) -> int:
        """How many answers wait to be taken."""
        return self._answers.qsize()

    def answer(self, timeout_s: float) -> Answer | Exception:
        """The answer, or what ended the stream.

        Raises:
            queue.Empty: nothing came in time.
        """
        return self._answers.get(timeout=max(timeout_s, 0.0))

    def close(self) -> None:
        """End the call."""
        if self._offer:
            self._offer.withdraw()  # first: who waits for the call sees no name any more
        self._outbox.put(None)
        self._call.cancel()

    def _frames(self, request: Request) -> Iterator[bytes]:
        offer = self._offer
        fits = request.payload.nbytes <= request.weights.nbytes
        if offer and offer.mapped and request.header.kind == PUSH and fits:
            area = offer.segment.gradient(request.header.sequence).view(np.uint8)
            area[: request.payload.nbytes] = request.payload
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
                    self._deliver(self._assemble(header, payload, incoming))
            self._deliver(ProtocolError("The stream ended without an answer."))
        except Exception as error:  # whatever ends the reader is told to who waits
            self._deliver(error)
        finally:
            self._outbox.put(None)

    def _deliver(self, answer: Answer | Exception) -> None:
        (self._on_the_way if self._emulated else self._answers).put(answer)

    def _delay(self, emulated: EmulatedLink) -> None:
        """Hold answers back as long as an emulated link would; the last thing that comes is what ended the stream."""
        while isinstance(answer := self._on_the_way.get(), Answer):
            emulated.receive(answer.payload_bytes, answer.arrived_at)
            self._answers.put(replace(answer, arrived_at=time.monotonic()))
        self._answers.put(answer)

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
        request = self._requests.popleft() if self._requests else None
        if header.kind != WEIGHTS:
            return Answer(header, False)
        if request is not None and header.codec and request.header.reply_codec:
            return Answer(header, True, difference=self._difference(request, header, payload, incoming))
        if request is None or header.total_bytes != request.weights.nbytes:
            wanted = request.weights.nbytes if request else 0
            raise ProtocolError(f"Answer: expected {wanted} bytes of weights. Received: {header.total_bytes}.")
        if header.shared:
            return Answer(header, True, self._shared_weights(header))
        _put_together(request.weights, header, payload, incoming)
        return Answer(header, True)

    def _difference(self, request: Request, header: Frame, payload: memoryview, incoming: Iterator[bytes]) -> Payload:
        codec, size = find_decoder(header.codec), request.weights.nbytes // 4
        codec.check(header.total_bytes, size)
        if header.shared:
            shared = self._shared_weights(header).view(np.uint8)[: header.total_bytes]
            codec.check(shared.size, size)
            return shared
        buffer = np.empty(header.total_bytes, np.uint8)
        _put_together(buffer, header, payload, incoming)
        return buffer

    def _shared_weights(self, header: Frame) -> Vector:
        if self._offer is None or not self._offer.mapped:
            raise ProtocolError("Answer: expected weights on the stream, as no memory is shared. Received: none.")
        view = self._offer.segment.weights(header.sequence).view()
        view.flags.writeable = False
        self.received += header.total_bytes
        return view


def _delayed(frames: Iterator[bytes], request: Request, emulated: EmulatedLink) -> Iterator[bytes]:
    emulated.send(request.payload.nbytes, request.asked_at)
    yield from frames


def _put_together(buffer: Any, header: Frame, payload: memoryview, incoming: Iterator[bytes]) -> None:
    assembly = Assembly(buffer)
    assembly.add(header.offset, payload)
    while not assembly.complete:
        chunk, payload = decode_frame(next(incoming, b""))
        assembly.add(chunk.offset, payload)
