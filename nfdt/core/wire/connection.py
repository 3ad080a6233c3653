"""TCP connections, plain or with TLS, for one thread that sends and one that receives; TLS settings of both sides.

Every wait has a time limit. Plain connections block in the kernel, where the limit is set once: Python's own limits
cost another system call for each piece. A TLS object serves one thread at a time, so no thread blocks inside it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nfdt.core.errors import UsageError

TICKET_BYTES = 32  # length of the ticket that a client sends first

# A peer whose machine or link is gone is noticed within 8 s, unless data are on the way to it.
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
Pem = str | Path | bytes
"""PEM data (bytes), or the path of a file with them."""


def read_pem(pem: Pem) -> bytes:
    """Return PEM data."""
    return pem if isinstance(pem, bytes) else Path(pem).read_bytes()


def load_key_pair(context: ssl.SSLContext, cert: Pem, key: Pem | None) -> None:
    """Load a certificate and its key into a TLS context, which takes files only."""
    if not isinstance(cert, bytes) and not isinstance(key, bytes):
        context.load_cert_chain(cert, key)
        return
    with tempfile.NamedTemporaryFile() as file:  # mode 0600, removed at once
        file.write(read_pem(cert) + b"\n" + (read_pem(key) if key else b""))
        file.flush()
        context.load_cert_chain(file.name)


@contextlib.contextmanager
def checked(expected: str, *pems: Pem | None) -> Iterator[None]:
    """Turn an error of the TLS library about PEM data into an error that names the files.

    Args:
        expected: What the data must be.
        *pems: The data.

    Raises:
        UsageError: The block raised an error about them.
    """
    try:
        yield
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)
        files = ", ".join(str(pem) for pem in pems if pem and not isinstance(pem, bytes)) or "PEM data"
        raise UsageError(
            f"TLS: expected {expected}. Received: {files} ({reason.replace('_', ' ').lower()}). "
            "Give matching PEM files that this user can read; `nfdt certs` makes some."
        ) from None


class Connection(ABC):
    """A connected peer; no wait of one call is longer than ``timeout_s``."""

    _peer: socket.socket

    @abstractmethod
    def send(self, parts: Sequence[memoryview]) -> int:
        """Send the beginning of ``parts`` and return its length in bytes. Raises TimeoutError or OSError."""

    @abstractmethod
    def receive(self, view: memoryview) -> int:
        """Receive into ``view`` and return the number of bytes, 0 at the end. Raises TimeoutError or OSError."""

    def shut_down(self, how: int) -> None:
        """End sending, receiving or both (``socket.SHUT_*``); wakes other threads that wait for the connection."""
        with contextlib.suppress(OSError):  # not connected any more
            # SSLSocket.shutdown drops the keys: later data would be sent unencrypted.
            socket.socket.shutdown(self._peer, how)

    def close(self) -> None:
        """Close the connection's descriptor."""
        self._peer.close()


class PlainConnection(Connection):
    """Connection without TLS, which blocks in the kernel."""

    def __init__(self, peer: socket.socket, timeout_s: float) -> None:
        _prepare(peer)
        peer.settimeout(None)
        seconds, fraction = divmod(timeout_s, 1)
        limit = struct.pack("ll", int(seconds), int(fraction * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            peer.setsockopt(socket.SOL_SOCKET, option, limit)
        self._peer = peer

    def send(self, parts: Sequence[memoryview]) -> int:
        """Send the beginning of ``parts``."""
        try:
            return self._peer.sendmsg(parts)
        except BlockingIOError:
            raise TimeoutError("The other side takes nothing.") from None

    def receive(self, view: memoryview) -> int:
        """Receive into ``view``."""
        try:
            return self._peer.recv_into(view)
        except BlockingIOError:
            raise TimeoutError("Nothing came in time.") from None


class TlsConnection(Connection):
    """Connection with TLS, which waits for the peer outside of the TLS object."""

    def __init__(self, peer: ssl.SSLSocket, timeout_s: float) -> None:
        _prepare(peer)
        peer.setblocking(False)
        self._peer, self._timeout_s = peer, timeout_s
        self._lock = threading.Lock()

    def send(self, parts: Sequence[memoryview]) -> int:
        """Send the beginning of ``parts``."""
        return self._when_ready(self._peer.send, parts[0])

    def receive(self, view: memoryview) -> int:
        """Receive into ``view``."""
        return self._when_ready(self._peer.recv_into, view)

    def _when_ready(self, operation: Callable[[memoryview], int], view: memoryview) -> int:
        while True:
            try:
                with self._lock:
                    return operation(view)
            except ssl.SSLWantReadError:
                awaited = select.POLLIN
            except ssl.SSLWantWriteError:
                awaited = select.POLLOUT
            poll = select.poll()
            poll.register(self._peer, awaited)
            if not poll.poll(self._timeout_s * 1000):
                raise TimeoutError("The other side is silent.")


def adopt(peer: socket.socket, timeout_s: float) -> Connection:
    """Wrap a connected socket, TLS or not, as a :class:`Connection`."""
    return TlsConnection(peer, timeout_s) if isinstance(peer, ssl.SSLSocket) else PlainConnection(peer, timeout_s)


def connect(host: str, port: int, ticket: bytes, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> Connection:
    """Connect and send the ticket.

    Raises:
        TimeoutError: the connection was not accepted in time.
        OSError: nothing listens at the address, or TLS failed.
    """
    peer = socket.create_connection((host, port), timeout_s)
    try:
        if tls:
            peer = tls.wrap_socket(peer, server_hostname=host)
        peer.sendall(ticket)
        return adopt(peer, timeout_s)
    except BaseException:
        peer.close()
        raise


def server_tls(cert: Pem, key: Pem | None, client_ca: Pem | None) -> ssl.SSLContext:
    """Return the TLS context of a server with a PEM certificate and key.

    Clients must present a certificate signed by ``client_ca`` if that is given.

    Raises:
        UsageError: the key is missing or belongs to another certificate, or a file holds no PEM certificate or key.
    """
    if key is None:
        raise UsageError("TLS: expected a certificate and its private key (--tls-key). Received: a certificate only.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with checked("the PEM certificate chain of the server and its private key", cert, key):
        load_key_pair(context, cert, key)
    if client_ca:
        with checked("PEM certificates of those who sign clients' certificates", client_ca):
            context.load_verify_locations(cadata=read_pem(client_ca).decode())
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(ca_file: Pem, cert_file: Pem | None, key_file: Pem | None) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts ``ca_file`` and presents ``cert_file`` if given; all are PEM.

    Raises:
        UsageError: a file holds no PEM certificate or key, or the key belongs to another certificate.
    """
    with checked("PEM certificates to trust", ca_file):
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cadata=read_pem(ca_file).decode())
    if cert_file:
        with checked("the PEM certificate of this client and its private key", cert_file, key_file):
            load_key_pair(context, cert_file, key_file)
    return context


def _prepare(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
