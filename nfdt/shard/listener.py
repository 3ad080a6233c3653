"""Port of the streams on which workers push and pull, open to connections that present a ticket."""

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
WARN_EVERY_S = 10.0
MOST_ANONYMOUS = 64  # connections that have not shown a ticket yet


class ShardListener:
    """Listener that serves each connection in a separate thread.

    Args:
        serve: Serves a stream, given the worker's name; the stream is closed when it returns or raises.
        host: Interface to listen on, at a free port.
        most: Limit on connections and unused tickets together.
        tls: TLS context; None for plain text.
    """

    def __init__(
        self, serve: Callable[[FrameStream, str], None], host: str, most: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._serve, self._most, self._tls = serve, most, tls
        self._lock = threading.Lock()
        self._tickets: dict[bytes, tuple[float, str]] = {}  # end of validity, and worker
        self._serving: dict[FrameStream, threading.Thread] = {}
        self._anonymous = threading.BoundedSemaphore(MOST_ANONYMOUS)
        self._warned_at, self._not_warned = -WARN_EVERY_S, 0
        self._stopped = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=128)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="shard-accept", daemon=True).start()

    def ticket(self, worker: str) -> bytes:
        """Issue a ticket for one connection of a worker within ``TICKET_S`` seconds.

        Raises:
            Refused: the limit is reached.
        """
        now = time.monotonic()
        with self._lock:
            self._tickets = {ticket: good for ticket, good in self._tickets.items() if good[0] > now}
            if len(self._tickets) + len(self._serving) >= self._most:
                raise Refused(f"Connections: expected at most {self._most}. Received: one more.")
            ticket = secrets.token_bytes(TICKET_BYTES)
            self._tickets[ticket] = now + TICKET_S, worker
        return ticket

    def stop(self, grace_s: float) -> bool:
        """Stop listening; running requests share ``grace_s`` seconds. Can be called twice.

        Returns:
            Whether all requests have ended.
        """
        self._stopped.set()
        try:
            self._listening.shutdown(socket.SHUT_RDWR)  # ends the wait in accept
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
        ended = not any(thread.is_alive() for thread in serving.values())
        for stream in serving:
            stream.close()
        return ended

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                peer, _ = self._listening.accept()
            except OSError as error:  # closed; or this process has too many open files, which may be temporary
                if not self._stopped.wait(ACCEPT_AGAIN_S):
                    self._warn(f"a connection could not be accepted: {error}")
                continue
            if not self._anonymous.acquire(blocking=False):
                self._warn(f"more than {MOST_ANONYMOUS} connections without a ticket")
                peer.close()
                continue
            thread = threading.Thread(target=self._admit, args=(peer,), name="shard-connection", daemon=True)
            try:
                thread.start()
            except (RuntimeError, MemoryError) as error:  # a limit on threads or memory, which may be temporary
                self._anonymous.release()
                peer.close()
                self._warn(f"a connection was closed, no thread could serve it: {error}")

    def _warn(self, what: str) -> None:
        """Log events that anonymous connections can cause, at most one line per ``WARN_EVERY_S`` seconds."""
        now = time.monotonic()
        if now - self._warned_at < WARN_EVERY_S:
            self._not_warned += 1
            return
        more = f" ({self._not_warned} such lines were left out)" if self._not_warned else ""
        self._warned_at, self._not_warned = now, 0
        logger.warning("Port %d: %s%s", self.port, what, more)

    def _admit(self, peer: socket.socket) -> None:
        with peer:
            try:
                admitted = self._authenticate(peer)
            finally:
                self._anonymous.release()
            if admitted is None:
                return
            stream, worker = admitted
            try:
                self._serve(stream, worker)
            except OSError as error:
                logger.info("Port %d: a worker's connection is gone: %s", self.port, error)
            finally:
                with self._lock:
                    self._serving.pop(stream, None)
                stream.close()

    def _authenticate(self, peer: socket.socket) -> tuple[FrameStream, str] | None:
        """Return the stream and the worker of a connection that presents a valid ticket; close any other connection."""
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
        worker = self._enter(stream, ticket)
        if worker is not None:
            return stream, worker
        stream.close()
        return None

    def _enter(self, stream: FrameStream, ticket: bytes) -> str | None:
        """Return the worker that the ticket was issued to; None for an invalid ticket."""
        with self._lock:
            until, worker = self._tickets.pop(ticket, (0.0, ""))
            if until > time.monotonic():
                self._serving[stream] = threading.current_thread()
                return worker
        logger.warning("Port %d: a connection without a good ticket was closed.", self.port)
        return None


def _shown(peer: socket.socket, until: float) -> bytes:
    """Receive the ticket, which must arrive before ``until``."""
    ticket = b""
    while len(ticket) < TICKET_BYTES:
        peer.settimeout(max(0.001, until - time.monotonic()))
        more = peer.recv(TICKET_BYTES - len(ticket))
        if not more:
            raise EOFError(f"it ended after {len(ticket)} bytes")
        ticket += more
    return ticket
