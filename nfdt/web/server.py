"""The web server of the page, in a thread of the job server's process."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from dataclasses import dataclass
from typing import Any

import uvicorn
from h11 import LocalProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from nfdt.core.errors import Refused, ServerUnreachable, UsageError
from nfdt.core.jobs.rights import Holder
from nfdt.core.wire.channel import is_loopback, join_address, split_address
from nfdt.core.wire.connection import server_tls
from nfdt.core.wire.doorkeeper import ConnectionLimits, Doorkeeper
from nfdt.web.pages import Pages, PageSource
from nfdt.web.series import WorkerSeries
from nfdt.web.sessions import PageSessions

READ_BYTES = 2**14
BACKLOG = 64  # connections that wait to be accepted; asyncio accepts so many at a time
START_S = 30.0
STOP_S = 5.0
_ANY = ("0.0.0.0", "::")


@dataclass(frozen=True)
class PageAddress:
    """Address of the page, and how it is protected.

    Attributes:
        listen: ``host:port``; port 0 takes a free one.
        cert: PEM certificate chain; it enables TLS.
        key: PEM private key.
        insecure: Whether an address other than loopback without TLS is allowed.
        host: Name in links where ``listen`` is every address of the machine.
        most: Number of connections at a time; further ones are closed.
    """

    listen: str
    cert: str | None = None
    key: str | None = None
    insecure: bool = False
    host: str = "127.0.0.1"
    most: int = 512


class _Listener(socket.socket):
    """Listening socket that has at most ``most`` accepted connections at a time: each uses a descriptor.

    The web server's own limit counts a connection after its TLS handshake only, and keeps it while it is refused.
    """

    def __init__(self, listening: socket.socket, most: int) -> None:
        super().__init__(fileno=listening.detach())
        self._most = most
        self._accepted: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, or close it and raise ConnectionAbortedError, after which asyncio goes on."""
        connection, peer = super().accept()
        self._accepted = [one for one in self._accepted if one.fileno() >= 0]
        if len(self._accepted) >= self._most:
            connection.close()
            raise ConnectionAbortedError("The page has too many connections.")
        self._accepted.append(connection)
        return connection, peer


class _Protocol(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 that reads into a buffer, and ends a connection whose bytes turn out wrong after an answer has begun.

    Without a protocol's own buffer, asyncio takes 256 KiB for each read, and shrinks them to what has come. glibc finds
    room for them only at the end of its heap, whose free pieces grew by about 190 bytes for each made-up connection.
    """

    _buffer: bytearray

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return where the next bytes go."""
        self._buffer = bytearray(READ_BYTES)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes that have arrived there."""
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def send_400_response(self, msg: str) -> None:
        """Answer that a request is wrong, unless another answer has begun; close the connection, and give up others.

        A connection with TLS ends later, so that the answer to the head of the wrong request would come after this one.
        """
        try:
            super().send_400_response(msg)
        except LocalProtocolError:
            self.transport.close()
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()


class PageServer:
    """The page, served from :meth:`start` to :meth:`stop`.

    Args:
        address: Address of the page.
        source: Parts of the server that it shows.

    Attributes:
        url: Its address for browsers, without a key.

    Raises:
        Refused: the address is not loopback, without TLS and without ``insecure``.
        UsageError: the address cannot be bound, or certificate and key cannot be used.
    """

    def __init__(self, address: PageAddress, source: PageSource) -> None:
        self._socket, self.url = _bind(address)
        self._sessions = PageSessions()
        self._series = WorkerSeries(source.store, lambda: source.runner.slots("shard"))
        cookie = f"nfdt-{self._socket.getsockname()[1]}"
        self._doorkeeper = Doorkeeper(ConnectionLimits.of(address.most))
        self._doorkeeper.ports.add(self._socket.getsockname()[1])
        pages = Pages(
            source,
            self._sessions,
            self._series,
            cookie=cookie,
            secure=address.cert is not None,
            admit=self._doorkeeper.admit_address,
        )
        config = uvicorn.Config(
            pages.app(),
            http=_Protocol,
            loop="asyncio",  # which accepts with the listener's own method
            ssl_certfile=address.cert,
            ssl_keyfile=address.key,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            backlog=BACKLOG,
            proxy_headers=False,  # a connection is known by its own address
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="page", daemon=True)

    def start(self) -> None:
        """Serve.

        Raises:
            ServerUnreachable: the web server has ended, or has not begun to serve in time.
        """
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._series.start()
        self._thread.start()
        self._doorkeeper.start()
        waiting = threading.Event()
        for _ in range(int(START_S / 0.01)):
            if self._server.started or not self._thread.is_alive():
                break
            waiting.wait(0.01)
        if not self._server.started:
            raise ServerUnreachable(f"The page at {self.url} did not start to serve.")

    def stop(self) -> None:
        """End all streams and serve no more."""
        self._server.should_exit = True
        self._doorkeeper.stop()
        self._series.stop()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._socket.close()

    def make_link(self, holder: Holder, job_id: str = "") -> str:
        """Return a link that opens the page once, at a job or at the list of jobs, with the rights of the holder."""
        job = f"&job={job_id}" if job_id else ""
        return f"{self.url}open?key={self._sessions.make_link(holder)}{job}"


def _bind(address: PageAddress) -> tuple[_Listener, str]:
    """Return a listening socket and the page's URL."""
    host, port = split_address(address.listen)
    if not (address.cert or address.insecure or is_loopback(host)):
        raise Refused(
            f"--ui {address.listen}: the page without TLS would send keys in plain text over the network. Give a "
            "certificate and key (--tls-cert, --tls-key), listen on 127.0.0.1, or insist with --insecure."
        )
    if address.cert:
        server_tls(address.cert, address.key, None)  # the web server's own errors name no file
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = _Listener(socket.create_server((host, port), family=family, backlog=BACKLOG), address.most)
    except OSError as error:
        raise UsageError(f"--ui {address.listen}: expected an address that is free. Received: {error}.") from None
    listener.set_inheritable(False)
    shown = join_address(address.host if host in _ANY else host, listener.getsockname()[1])
    return listener, f"{'https' if address.cert else 'http'}://{shown}/"
