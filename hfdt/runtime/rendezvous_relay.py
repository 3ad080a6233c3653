"""Rendezvous of Horovod's Gloo in this process: an HTTP key-value store on loopback that asks the job server.

Horovod's own stores are HTTP servers without a password, open to the network.
This one answers only connections of its own process, and forwards them over the connection to the job server, which
has a token and TLS.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil

from nfdt.core.errors import NfdtError
from nfdt.core.wire.channel import LOOPBACK

logger = logging.getLogger(__name__)

REQUEST_S = 10.0  # limit of one request
MOST_BYTES = 2**22  # of one value

Exchange = Callable[[str, bytes | None], bytes | None]
"""Stores a value under a key, or with None returns the value, None if there is none."""


@contextlib.contextmanager
def serve_rendezvous(exchange: Exchange) -> Iterator[int]:
    """Serve the values during the block; yield the port on loopback.

    Args:
        exchange: Access to the values.
    """
    server = _RelayServer((LOOPBACK, 0), exchange)
    thread = threading.Thread(target=server.serve_forever, name="rendezvous", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _RelayServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], exchange: Exchange) -> None:
        super().__init__(address, _RelayHandler)
        self.exchange = exchange

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the connection's other end is in this process."""
        own = psutil.Process().net_connections(kind="tcp4")
        return any(tuple(link.laddr) == client_address and tuple(link.raddr) == self.server_address for link in own)


class _RelayHandler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: _RelayServer

    def do_PUT(self) -> None:
        """Store a value."""
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > MOST_BYTES:
            self._answer(413)
            return
        self._forward(self.rfile.read(int(size)))

    def do_GET(self) -> None:
        """Return a value."""
        self._forward(None)

    def do_DELETE(self) -> None:
        """Accept that this rank is done with a scope: the job server drops all values together."""
        self._answer(200)

    def _forward(self, value: bytes | None) -> None:
        try:
            found = self.server.exchange(self.path, value)
        except NfdtError as error:
            logger.error("the rendezvous failed: %s", error)
            logging.shutdown()
            os._exit(0)  # Horovod would abort the process
        self._answer(404 if value is None and found is None else 200, found or b"")

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
