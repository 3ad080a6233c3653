"""One connection of a worker to one shard: sends requests, receives replies in the order of the requests."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from nfdt.codecs import find_decoder
from nfdt.core.errors import ProtocolError
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, PUSH, WEIGHTS, Frame
from nfdt.core.wire.shared_memory import Offer
from nfdt.transport.base import Vector, WeightDelta
from nfdt.transport.emulated_link import EmulatedLink

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShardRequest:
    """Push or pull: its header, the gradient's bytes (empty for a pull), and the buffer for weights."""

    header: Frame
    payload: memoryview
    weights: memoryview
    asked_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class ShardAnswer:
    """Reply of the shard.

    Attributes:
        header: Header of the reply.
        shared: Read-only view of the weights in shared memory; valid as long as the weights of ``Pulled``.
        delta: Delta to the weights of an earlier reply; valid as long as ``shared``.
        arrived_at: Time of arrival on the monotonic clock.
    """

    header: Frame
    shared: Vector | None = None
    delta: WeightDelta | None = None
    arrived_at: float = field(default_factory=time.monotonic)

    @property
    def has_weights(self) -> bool:
        """Whether weights arrived: in the request's buffer, in ``shared``, or as a ``delta``."""
        return self.header.kind == WEIGHTS

    @property
    def payload_bytes(self) -> int:
        """Number of bytes of the weights or delta."""
        return self.header.total_bytes if self.has_weights else 0


class ShardCall:
    """Connection that sends requests and assembles replies.

    An offer of shared memory is sent before the first request, which uses the stream as the shard has not answered yet.
    Once the offer is accepted, requests put their gradient in the segment. Both sides find the areas of a request
    there by its sequence number.

    Args:
        stream: Stream to the shard.
        offer: Offer of shared memory, or None.
        emulated: Delays requests and replies.
        threads: Send and receive in separate threads, so that the caller continues and other shards work concurrently.
            Otherwise the caller sends in :meth:`ask` and receives in :meth:`answer`, which is faster for one shard.
    """

    def __init__(
        self, stream: FrameStream, offer: Offer | None, emulated: EmulatedLink | None = None, *, threads: bool = False
    ) -> None:
        self._stream, self._offer, self._offered = stream, offer, False
        self._emulated, self._threads = emulated, threads
        self._to_send: queue.SimpleQueue[ShardRequest | None] = queue.SimpleQueue()
        self._on_the_way: queue.SimpleQueue[ShardAnswer | Exception] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[ShardAnswer | Exception] = queue.SimpleQueue()
        self._requests: deque[ShardRequest] = deque()
        self._shared_sent = self._shared_received = 0
        if threads:
            for work in (self._send_all, self._receive_all, *((self._delay,) if emulated else ())):
                threading.Thread(target=work, name=f"shard{work.__name__}", daemon=True).start()

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Number of bytes (sent, received), on the stream and in shared memory."""
        return self._stream.sent + self._shared_sent, self._stream.received + self._shared_received

    def ask(self, request: ShardRequest) -> None:
        """Send a request. Errors are raised by the wait for its reply."""
        self._requests.append(request)
        if self._threads:
            self._to_send.put(request)
        else:
            self._send(request)

    @property
    def arrived(self) -> int:
        """Number of received replies that have not been taken."""
        return self._answers.qsize()

    def answer(self, timeout_s: float) -> ShardAnswer | Exception:
        """Return the reply to the oldest request, or the error that ended the stream.

        Raises:
            TimeoutError: no reply arrived in time.
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

    def interrupt(self) -> None:
        """End the exchanges of other threads with an error, without those that an emulated link would still delay."""
        self._stream.interrupt()
        self._answers.put(EOFError("The connection was interrupted."))

    def close(self) -> None:
        """Close the stream; a wait in another thread ends."""
        if self._offer:
            self._offer.withdraw()  # first, so that its name is gone when the call is over
        self._to_send.put(None)
        self._stream.close()

    # -- out

    def _send_all(self) -> None:
        try:
            while (request := self._to_send.get()) is not None:
                self._send(request)
        except Exception as error:  # no reply will arrive: waiting for one fails at once
            self._answers.put(error)

    def _send(self, request: ShardRequest) -> None:
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
        except OSError as error:  # then no reply arrives either, or one with the reason
            logger.debug("Request %d could not be sent: %s", header.sequence, error)

    # -- in

    def _receive_all(self) -> None:
        answers = self._on_the_way if self._emulated else self._answers
        try:
            while True:
                answers.put(self._receive(patiently=True))
        except Exception as error:  # raised by waiting for a reply
            answers.put(error)
        finally:
            self._to_send.put(None)

    def _delay(self) -> None:
        """Delay replies as an emulated link would, and pass on the error that ended the stream."""
        while isinstance(answer := self._on_the_way.get(), ShardAnswer):
            if self._emulated:
                self._emulated.receive(answer.payload_bytes, answer.arrived_at)
            self._answers.put(replace(answer, arrived_at=time.monotonic()))
        self._answers.put(answer)

    def _receive(self, *, patiently: bool = False) -> ShardAnswer:
        while (header := self._stream.receive_header(patiently=patiently)) is not None:
            if header.kind != ACKNOWLEDGE or header.sequence:
                return self._complete(header)
            self._settle(header)
        raise EOFError("The connection ended without an answer.")

    def _settle(self, answer: Frame) -> None:
        """Process the shard's reply to the offer."""
        if self._offer:
            self._offer.conclude(mapped=answer.applied)
            if not answer.applied:
                logger.info("The shard does not share memory. %s", answer.error)

    def _complete(self, header: Frame) -> ShardAnswer:
        request = self._requests.popleft() if self._requests else None
        if header.kind != WEIGHTS:
            return ShardAnswer(header)
        if request is not None and header.codec and request.header.reply_codec:
            return ShardAnswer(header, delta=self._delta(request, header))
        if request is None or header.total_bytes != request.weights.nbytes:
            wanted = request.weights.nbytes if request else 0
            raise ProtocolError(f"Answer: expected {wanted} bytes of weights. Received: {header.total_bytes}.")
        if header.shared:
            return ShardAnswer(header, self._shared_weights(header))
        self._stream.receive_into(request.weights)
        return ShardAnswer(header)

    def _delta(self, request: ShardRequest, header: Frame) -> WeightDelta:
        codec, size = find_decoder(header.codec), request.weights.nbytes // 4
        codec.check(header.total_bytes, size)
        if header.shared:
            shared = self._shared_weights(header).view(np.uint8)[: header.total_bytes]
            codec.check(shared.size, size)
            return WeightDelta(codec, shared, header.base)
        buffer = np.empty(header.total_bytes, np.uint8)
        self._stream.receive_into(buffer)
        return WeightDelta(codec, buffer, header.base)

    def _shared_weights(self, header: Frame) -> Vector:
        if self._offer is None or not self._offer.mapped:
            raise ProtocolError("Answer: expected weights on the stream, as no memory is shared. Received: none.")
        view = self._offer.segment.weights(header.sequence).view()
        view.flags.writeable = False
        self._shared_received += header.total_bytes
        return view
