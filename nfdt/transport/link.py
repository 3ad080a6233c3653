"""One worker's link to one shard: every wait has a deadline, and a broken connection is opened again.

Replies arrive in the order of the requests, several of which may be unanswered. A stream is opened with a ticket of the
shard's service, which admits the worker to the port of its streams.
"""

from __future__ import annotations

import logging
import queue
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np

from nfdt.codecs import find_decoder
from nfdt.core.errors import NfdtError, ProtocolError, ServerUnreachable, error_class
from nfdt.core.wire.channel import open_channel, split_address
from nfdt.core.wire.connection import client_tls, connect
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, PUSH, WEIGHTS, Frame, OpenReply, OpenRequest
from nfdt.core.wire.shared_memory import Offer
from nfdt.core.wire.status import translate
from nfdt.core.work.patience import Patience
from nfdt.transport.base import Vector, WeightDelta
from nfdt.transport.emulated_link import EmulatedLink

logger = logging.getLogger(__name__)

METHOD = "/nfdt.v1.Shard/Open"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class ShardRequest:
    """Request: its header, the bytes of a gradient or of row numbers, and the buffer for weights or rows."""

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

    def gradient_area(self, sequence: int) -> Vector | None:
        """Return the memory that the shard reads for the push ``sequence``; None while no memory is shared."""
        return self._offer.segment.gradient(sequence) if self._offer and self._offer.mapped else None

    # -- requests

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
            # An encoding may be larger than the vector itself, and then than the area for it.
            if offer and offer.mapped and header.kind == PUSH and payload.nbytes <= request.weights.nbytes:
                header.shared = True
                area = offer.segment.gradient(header.sequence).view(np.uint8)[: payload.nbytes]
                if not _is_same_memory(area, payload):
                    area[:] = payload
                self._shared_sent += payload.nbytes
                payload = memoryview(b"")
            self._stream.send(header, payload)
        except OSError as error:  # then no reply arrives either, or one with the reason
            logger.debug("Request %d could not be sent: %s", header.sequence, error)

    # -- replies

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
            if self._offer:  # request 0 is the offer of shared memory
                self._offer.conclude(mapped=header.applied)
                if not header.applied:
                    logger.info("The shard does not share memory. %s", header.error)
        raise EOFError("The connection ended without an answer.")

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


class ShardConnector:
    """Connector that opens streams to one shard.

    Args:
        address: ``host:port`` of the shard's service.
        token: Token of the worker.
        timeout_s: Longest wait.
        **security: ``ca_file``, ``cert_file``, ``key_file``, ``insecure`` of
            :func:`nfdt.core.wire.channel.open_channel`.
    """

    def __init__(self, address: str, token: str, timeout_s: float, **security: Any) -> None:
        self.address, self._timeout_s = address, timeout_s
        self._channel = open_channel(address, token, **security)
        self._tls: ssl.SSLContext | None = None
        if security.get("ca_file"):
            self._tls = client_tls(security["ca_file"], security.get("cert_file"), security.get("key_file"))

    def open(self) -> FrameStream:
        """Open a new stream.

        Raises:
            grpc.RpcError: the shard did not issue a ticket.
            OSError: the port of its streams cannot be reached.
        """
        ask: Any = self._channel.unary_unary(METHOD, OpenRequest.SerializeToString, OpenReply.FromString)
        found: OpenReply = ask(OpenRequest(), timeout=self._timeout_s)
        host, _ = split_address(self.address)
        return FrameStream(connect(host, found.port, found.ticket, timeout_s=self._timeout_s, tls=self._tls))

    def close(self) -> None:
        """Close the channel to the service; open streams stay open."""
        self._channel.close()


class ShardLink:
    """Link that sends requests to one shard and waits for its replies.

    Args:
        connector: Opens streams to the shard; closed with the link.
        timeout_s: Longest wait for one reply.
        overlap: Number of requests that may be unanswered while another one is sent.
        shared_bytes: Size of the memory areas to offer to a shard on this machine: that of all its weights; 0: none.
        emulated: Delays requests and replies.
        patience: Time to search for a shard that cannot be reached; None: one more attempt.
        threads: See :class:`ShardCall`.
    """

    def __init__(
        self,
        connector: ShardConnector,
        timeout_s: float,
        *,
        overlap: int = 0,
        shared_bytes: int = 0,
        emulated: EmulatedLink | None = None,
        patience: Patience | None = None,
        threads: bool = False,
    ) -> None:
        self._connector, self._address = connector, connector.address
        self._timeout_s, self._patience = timeout_s, patience
        self._overlap, self._shared_bytes = overlap, shared_bytes
        self._emulated, self._threads = emulated, threads
        self._stream: ShardCall | None = None
        self._not_opened: Exception | None = None
        self._requests: deque[ShardRequest] = deque()
        self._closed_bytes = (0, 0)
        self._closed = False

    @property
    def bytes_moved(self) -> tuple[int, int]:
        """Number of bytes (sent, received)."""
        sent, received = self._closed_bytes
        more_sent, more_received = self._stream.bytes_moved if self._stream else (0, 0)
        return sent + more_sent, received + more_received

    def ask(self, request: ShardRequest) -> None:
        """Send a request; :meth:`wait` returns its reply."""
        self._requests.append(request)
        if self._stream:
            self._stream.ask(request)
        else:
            self._ask_again()

    def gradient_area(self, sequence: int) -> Vector | None:
        """See :meth:`ShardCall.gradient_area`."""
        return self._stream.gradient_area(sequence) if self._stream else None

    def arrived(self, count: int) -> bool:
        """Return whether the replies to the oldest ``count`` requests have arrived, or no more will arrive."""
        stream = self._stream
        return stream is None or stream.arrived >= count

    def wait(self, sequence: int) -> ShardAnswer:
        """Return the reply to the oldest request, ``sequence``.

        A broken stream is reopened, and unanswered requests are sent again.

        Raises:
            ServerUnreachable: no reply in time, or the connection to the shard is lost.
            NfdtError: the shard answered with this error.
        """
        try:
            answer = self._wait()
            self._check(answer.header, sequence)
        except BaseException:
            self._drop()
            self._requests.clear()  # their outcome is unknown: waiting for them fails
            raise
        self._requests.popleft()
        return answer

    def _wait(self) -> ShardAnswer:
        tried = False
        while not isinstance(found := self._next(), ShardAnswer):
            self._drop()
            if self._closed or not _may_retry(found) or (tried and not self._waits_to_retry()):
                raise self._explained(found) from (None if isinstance(found, grpc.RpcError) else found)
            tried = True
            self._ask_again()
        if self._patience:
            self._patience.success()
        return found

    def _waits_to_retry(self) -> bool:
        return self._patience is not None and self._patience.failure()

    def interrupt(self) -> None:
        """End a wait in another thread, and every later one, with an error; :meth:`close` is still necessary."""
        self._closed = True
        if stream := self._stream:
            stream.interrupt()
        self._connector.close()

    def close(self) -> None:
        """End the stream and the channel."""
        self._closed = True
        self._drop()
        self._connector.close()

    def _ask_again(self) -> None:
        """Open a stream, and send all unanswered requests in order."""
        try:
            self._stream, self._not_opened = self._open(), None
        except (OSError, grpc.RpcError) as error:  # raised by the next wait
            self._not_opened = error
            return
        if self._closed:  # it was interrupted while the stream was opened
            self._stream.interrupt()
        for request in self._requests:
            self._stream.ask(request)

    def _open(self) -> ShardCall:
        """Open a stream with new shared memory: the shard may still use that of an old one."""
        stream = self._connector.open()
        offer = None
        if self._shared_bytes:
            try:
                offer = Offer(self._shared_bytes, pairs=self._overlap + 1)
            except OSError as error:
                logger.info("No memory to share with shard %s, its stream carries all bytes: %s", self._address, error)
        return ShardCall(stream, offer, self._emulated, threads=self._threads)

    def _next(self) -> ShardAnswer | Exception:
        stream = self._stream
        if self._not_opened:
            return self._not_opened
        if stream is None or not self._requests:
            return ServerUnreachable(f"Shard {self._address}: the connection was closed while it was used.")
        try:
            return stream.answer(self._requests[0].asked_at + self._timeout_s - time.monotonic())
        except TimeoutError:
            raise ServerUnreachable(
                f"Shard {self._address} did not answer within {self._timeout_s:g} s. It hangs or is overloaded; "
                "look at its log."
            ) from None

    def _check(self, header: Frame, wanted: int) -> None:
        if header.kind == ERROR:
            name, _, text = header.error.partition(": ")
            raise (error_class(name) or ProtocolError)(f"Shard {self._address}: {text or header.error}")
        if header.sequence != wanted or header.kind not in (WEIGHTS, ACKNOWLEDGE):
            raise ProtocolError(
                f"Shard {self._address}: expected the answer to request {wanted}. Received: kind {header.kind}, "
                f"request {header.sequence}."
            )

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, grpc.RpcError):
            return translate(error, f"shard {self._address}")
        if _is_broken(error):
            return ServerUnreachable(f"Shard {self._address}: the connection is lost: {error}. Look at its log.")
        return ProtocolError(f"Shard {self._address}: {error}") if isinstance(error, ProtocolError) else error

    def _drop(self) -> None:
        stream, moved = self._stream, self.bytes_moved  # counted before the stream is gone
        self._not_opened = None
        if stream:
            self._stream, self._closed_bytes = None, moved
            stream.close()


def _is_same_memory(area: Any, payload: memoryview) -> bool:
    return bool(payload.nbytes) and area.ctypes.data == np.frombuffer(payload, np.uint8).ctypes.data


def _may_retry(error: Exception) -> bool:
    return error.code() in _LOST if isinstance(error, grpc.RpcError) else _is_broken(error)


def _is_broken(error: Exception) -> bool:
    """Return whether the connection is; some errors of NFDT are also OSErrors."""
    return isinstance(error, EOFError | OSError) and not isinstance(error, NfdtError)
