"""The connections on which workers push and pull: a port of its own, open to those who show a ticket."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable

from nfdt.core.errors import Refused
from nfdt.core.wire.connection import TICKET_BYTES, adopt
from nfdt.core.wire.frame_stream import FrameStream

logger = logging.getLogger(__name__)

TICKET_S = 30.0
SHOW_TICKET_S = 10.0
TIMEOUT_S = 120.0  # in the middle of a frame
ACCEPT_AGAIN_S = 0.1
MOST_STRANGERS = 64  # connections that have not shown a ticket yet


class Listener:
    """Serves each connection in a thread of its own.

    Args:
        serve: What to do with one; it is closed when this returns or raises.
        host: Interface to listen on, at a free port.
        most: Connections, and tickets that are not used yet.
        tls: None for plain text.
    """

    def __init__(
        self, serve: Callable[[FrameStream], None], host: str, most: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._serve, self._most, self._tls = serve, most, tls
        self._lock = threading.Lock()
        self._tickets: dict[bytes, float] = {}  # until when they are good
        self._serving: dict[FrameStream, threading.Thread] = {}
        self._strangers = threading.BoundedSemaphore(MOST_STRANGERS)
        self._stopped = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="shard-accept", daemon=True).start()

    def ticket(self) -> bytes:
        """Lets one connection in, if it comes within ``TICKET_S`` seconds.

        Raises:
            Refused: there are too many.
        """
        now = time.monotonic()
        with self._lock:
            self._tickets = {ticket: until for ticket, until in self._tickets.items() if until > now}
            if len(self._tickets) + len(self._serving) >= self._most:
                raise Refused(f"Connections: expected at most {self._most}. Received: one more.")
            ticket = secrets.token_bytes(TICKET_BYTES)
            self._tickets[ticket] = now + TICKET_S
        return ticket

    def stop(self, grace_s: float) -> None:
        """Let no more in; what is being answered gets ``grace_s`` seconds in all. Can be called twice."""
        self._stopped.set()
        try:
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        except OSError:
            logger.debug("Port %d: the listening socket was shut down before.", self.port)
        self._listening.close()
        with self._lock:
            serving = dict(self._serving)
        for stream in serving:
            stream.stop_receiving()
        until = time.monotonic() + grace_s
        for thread in serving.values():
            thread.join(max(0.0, until - time.monotonic()))
        for stream in serving:
            stream.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                peer, _ = self._listening.accept()
            except OSError as error:  # closed; or this process has too many files open, which may pass
                if not self._stopped.wait(ACCEPT_AGAIN_S):
                    logger.warning("Port %d: a connection could not be accepted: %s", self.port, error)
                continue
            if not self._strangers.acquire(blocking=False):
                logger.warning("Port %d: more than %d connections without a ticket.", self.port, MOST_STRANGERS)
                peer.close()
                continue
            threading.Thread(target=self._admit, args=(peer,), name="shard-connection", daemon=True).start()

    def _admit(self, peer: socket.socket) -> None:
        with peer:
            try:
                stream = self._met(peer)
            finally:
                self._strangers.release()
            if stream is None:
                return
            try:
                self._serve(stream)
            except OSError as error:
                logger.info("Port %d: a worker's connection is gone: %s", self.port, error)
            finally:
                with self._lock:
                    self._serving.pop(stream, None)
                stream.close()

    def _met(self, peer: socket.socket) -> FrameStream | None:
        """The stream of a connection that shows a good ticket; one that does not is closed."""
        try:
            peer.settimeout(SHOW_TICKET_S)
            if self._tls:
                peer = self._tls.wrap_socket(peer, server_side=True)
            ticket = _shown(peer, time.monotonic() + SHOW_TICKET_S)
            stream = FrameStream(adopt(peer, TIMEOUT_S))
        except (OSError, EOFError) as error:
            logger.info("Port %d: a connection ended before it showed a ticket: %s", self.port, error)
            peer.close()
            return None
        if self._enter(stream, ticket):
            return stream
        stream.close()
        return None

    def _enter(self, stream: FrameStream, ticket: bytes) -> bool:
        with self._lock:
            good = self._tickets.pop(ticket, 0.0) > time.monotonic()
            if good:
                self._serving[stream] = threading.current_thread()
        if not good:
            logger.warning("Port %d: a connection without a good ticket was closed.", self.port)
        return good


def _shown(peer: socket.socket, until: float) -> bytes:
    """The ticket, which must be there before ``until``."""
    ticket = b""
    while len(ticket) < TICKET_BYTES:
        peer.settimeout(max(0.001, until - time.monotonic()))
        more = peer.recv(TICKET_BYTES - len(ticket))
        if not more:
            raise EOFError(f"it ended after {len(ticket)} bytes")
        ticket += more
    return ticket
