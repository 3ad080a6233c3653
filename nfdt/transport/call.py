"""One connection of a worker to one shard: requests out, answers in, in the order of the requests."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from nfdt.codecs import find_decoder
from nfdt.codecs.base import Payload
from nfdt.core.errors import ProtocolError
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, PUSH, WEIGHTS, Frame
from nfdt.core.wire.shared_memory import Offer
from nfdt.transport.base import Vector
from nfdt.transport.emulated_link import EmulatedLink

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """One push or pull: its header, the gradient's bytes (empty for a pull), and where all weights go."""

    header: Frame
    payload: memoryview
    weights: memoryview
    asked_at: float = field(default_factory=time.monotonic)


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
    """Sends requests and puts answers together.

    Where it offers shared memory, the offer goes out before the first request, which travels on the stream as the
    shard has not answered yet; requests after an offer that was accepted put their gradient in the segment. Both sides
    find a request's areas there by its sequence number.

    Args:
        stream: To the shard.
        offer: Of shared memory.
        emulated: Delays requests and answers.
        threads: Send and receive in threads of its own, so that the caller goes on meanwhile and others are asked at
            the same time. Else the caller sends in :meth:`ask` and receives in :meth:`answer`, which is sooner done.
    """

    def __init__(
        self, stream: FrameStream, offer: Offer | None, emulated: EmulatedLink | None = None, *, threads: bool = False
    ) -> None:
        self._stream, self._offer, self._offered = stream, offer, False
        self._emulated, self._threads = emulated, threads
        self._outbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._on_the_way: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()
        self._requests: deque[Request] = deque()
        self._shared_sent = self._shared_received = 0
        if threads:
            for work in (self._send_all, self._receive_all, *((self._delay,) if emulated else ())):
                threading.Thread(target=work, name=f"shard{work.__name__}", daemon=True).start()

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """(sent, received) so far, on the stream and in shared memory."""
        return self._stream.sent + self._shared_sent, self._stream.received + self._shared_received

    def ask(self, request: Request) -> None:
        """Send a request. What goes wrong is told to who waits for the answer."""
        self._requests.append(request)
        if self._threads:
            self._outbox.put(request)
        else:
            self._send(request)

    @property
    def arrived(self) -> int:
        """How many answers wait to be taken."""
        return self._answers.qsize()

    def answer(self, timeout_s: float) -> Answer | Exception:
        """The answer to the oldest request, or what ended the stream.

        Raises:
            TimeoutError: nothing came in time.
        """
        if self._threads:
            try:
                return self._answers.get(timeout=max(timeout_s, 0.0))
            except queue.Empty:
                raise TimeoutError("No answer came in time.") from None
        try:
            answer = self._receive()
        except TimeoutError:
            raise
        except Exception as error:
            return error
        if self._emulated:
            self._emulated.receive(answer.payload_bytes, answer.arrived_at)
            answer = replace(answer, arrived_at=time.monotonic())
        return answer

    def close(self) -> None:
        """End it; who waits in another thread is woken."""
        if self._offer:
            self._offer.withdraw()  # first: who waits for the call sees no name any more
        self._outbox.put(None)
        self._stream.close()

    # -- out

    def _send_all(self) -> None:
        try:
            while (request := self._outbox.get()) is not None:
                self._send(request)
        except Exception as error:  # no answer will come: who waits for one is told at once
            self._answers.put(error)

    def _send(self, request: Request) -> None:
        if self._emulated:
            self._emulated.send(request.payload.nbytes, request.asked_at)
        header, payload = Frame(), request.payload
        header.CopyFrom(request.header)
        header.total_bytes = payload.nbytes
        try:
            offer = self._offer
            if offer and not self._offered:
                self._offered = True
                self._stream.send(offer.frame(header.worker))
            fits = payload.nbytes <= request.weights.nbytes
            if offer and offer.mapped and header.kind == PUSH and fits:
                header.shared = True
                offer.segment.gradient(header.sequence).view(np.uint8)[: payload.nbytes] = payload
                self._shared_sent += payload.nbytes
                payload = memoryview(b"")
            self._stream.send(header, payload)
        except OSError as error:  # then no answer comes either, or one that says why
            logger.debug("Request %d could not be sent: %s", header.sequence, error)

    # -- in

    def _receive_all(self) -> None:
        answers = self._on_the_way if self._emulated else self._answers
        try:
            while True:
                answers.put(self._receive(patiently=True))
        except Exception as error:  # whatever ends it is told to who waits
            answers.put(error)
        finally:
            self._outbox.put(None)

    def _delay(self) -> None:
        """Hold answers back as long as an emulated link would; the last thing that comes is what ended the stream."""
        while isinstance(answer := self._on_the_way.get(), Answer):
            if self._emulated:
                self._emulated.receive(answer.payload_bytes, answer.arrived_at)
            self._answers.put(replace(answer, arrived_at=time.monotonic()))
        self._answers.put(answer)

    def _receive(self, *, patiently: bool = False) -> Answer:
        while (header := self._stream.receive_header(patiently=patiently)) is not None:
            if header.kind != ACKNOWLEDGE or header.sequence:
                return self._complete(header)
            self._settle(header)
        raise EOFError("The connection ended without an answer.")

    def _settle(self, answer: Frame) -> None:
        """The shard has answered the offer."""
        if self._offer:
            self._offer.settle(mapped=answer.applied)
            if not answer.applied:
                logger.info("The shard does not share memory. %s", answer.error)

    def _complete(self, header: Frame) -> Answer:
        request = self._requests.popleft() if self._requests else None
        if header.kind != WEIGHTS:
            return Answer(header, False)
        if request is not None and header.codec and request.header.reply_codec:
            return Answer(header, True, difference=self._difference(request, header))
        if request is None or header.total_bytes != request.weights.nbytes:
            wanted = request.weights.nbytes if request else 0
            raise ProtocolError(f"Answer: expected {wanted} bytes of weights. Received: {header.total_bytes}.")
        if header.shared:
            return Answer(header, True, self._shared_weights(header))
        self._stream.receive_into(request.weights)
        return Answer(header, True)

    def _difference(self, request: Request, header: Frame) -> Payload:
        codec, size = find_decoder(header.codec), request.weights.nbytes // 4
        codec.check(header.total_bytes, size)
        if header.shared:
            shared = self._shared_weights(header).view(np.uint8)[: header.total_bytes]
            codec.check(shared.size, size)
            return shared
        buffer = np.empty(header.total_bytes, np.uint8)
        self._stream.receive_into(buffer)
        return buffer

    def _shared_weights(self, header: Frame) -> Vector:
        if self._offer is None or not self._offer.mapped:
            raise ProtocolError("Answer: expected weights on the stream, as no memory is shared. Received: none.")
        view = self._offer.segment.weights(header.sequence).view()
        view.flags.writeable = False
        self._shared_received += header.total_bytes
        return view
