"""One worker's link to one shard: every wait has a deadline, and a broken connection is reopened.

Replies arrive in the order of the requests, several of which may be unanswered. A stream is opened with a ticket of the
shard's service, which admits the worker to the port of its streams.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections import deque
from typing import Any

import grpc

from nfdt.core.errors import NfdtError, ProtocolError, ServerUnreachable, error_class
from nfdt.core.wire.channel import open_channel, split_address
from nfdt.core.wire.connection import client_tls, connect
from nfdt.core.wire.frame_stream import FrameStream
from nfdt.core.wire.shards_pb2 import ACKNOWLEDGE, ERROR, WEIGHTS, Frame, OpenReply, OpenRequest
from nfdt.core.wire.shared_memory import Offer
from nfdt.core.wire.status import translate
from nfdt.core.work.patience import Patience
from nfdt.transport.call import ShardAnswer, ShardCall, ShardRequest
from nfdt.transport.emulated_link import EmulatedLink

logger = logging.getLogger(__name__)

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED)


METHOD = "/nfdt.v1.Shard/Open"


class ShardConnector:
    """Connector that opens streams to one shard.

    Args:
        address: ``host:port`` of the shard's service.
        token: Token of the worker.
        timeout_s: Longest wait.
        **security: ``ca_file``, ``cert_file``, ``key_file`` of :func:`nfdt.core.wire.channel.open_channel`.
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
        share_memory: Offer memory to a shard on this machine.
        emulated: Delays requests and replies.
        patience: Time to search for a shard that cannot be reached; None: one more attempt.
        threads: See :class:`nfdt.transport.call.ShardCall`.
    """

    def __init__(
        self,
        connector: ShardConnector,
        timeout_s: float,
        *,
        overlap: int = 0,
        share_memory: bool = False,
        emulated: EmulatedLink | None = None,
        patience: Patience | None = None,
        threads: bool = False,
    ) -> None:
        self._emulated, self._patience = emulated, patience
        self._share_memory = share_memory
        self._connector, self._address = connector, connector.address
        self._threads = threads
        self._timeout_s = timeout_s
        self._overlap = overlap
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
            if self._closed or not self._may_retry(found) or not self._goes_on(tried):
                raise self._explained(found) from (None if isinstance(found, grpc.RpcError) else found)
            tried = True
            self._ask_again()
        if self._patience:
            self._patience.success()
        return found

    def _goes_on(self, tried: bool) -> bool:
        """Return whether to open another stream: the first one at once, more until the patience ends."""
        return not tried or (self._patience is not None and self._patience.failure())

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
            self._stream, self._not_opened = self._open(self._requests[0].weights.nbytes), None
        except (OSError, grpc.RpcError) as error:  # raised by the next wait
            self._not_opened = error
            return
        if self._closed:  # it was interrupted while the stream was opened
            self._stream.interrupt()
        for request in self._requests:
            self._stream.ask(request)

    def _open(self, area_bytes: int) -> ShardCall:
        """Open a stream with new shared memory: the shard may still use that of an old one."""
        stream = self._connector.open()
        offer = None
        if self._share_memory and area_bytes:
            try:
                offer = Offer(area_bytes, pairs=self._overlap + 1)
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

    @staticmethod
    def _may_retry(error: Exception) -> bool:
        if isinstance(error, grpc.RpcError):
            return error.code() in _LOST
        return isinstance(error, EOFError | OSError) and not isinstance(error, NfdtError)

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, grpc.RpcError):
            return translate(error, f"shard {self._address}")
        if isinstance(error, EOFError | OSError) and not isinstance(error, NfdtError):
            return ServerUnreachable(f"Shard {self._address}: the connection is lost: {error}. Look at its log.")
        return ProtocolError(f"Shard {self._address}: {error}") if isinstance(error, ProtocolError) else error

    def _drop(self) -> None:
        stream, moved = self._stream, self.bytes_moved
        self._not_opened = None
        if stream:
            self._stream, self._closed_bytes = None, moved
            stream.close()
