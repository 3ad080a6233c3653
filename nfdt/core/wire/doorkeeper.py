"""Limits on the number and age of connections without a valid token, and a gRPC server that enforces them.

grpcio accepts every connection and does not list them, so the sockets of this process are inspected through /proc. A
connection is a stranger until a call with a valid token has arrived on it. Strangers beyond the limits are shut down,
which the server handles as the end of the connection. Linux only; elsewhere only the servers' own limits hold.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import resource
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from nfdt.core.wire.parsing import Seldom

_log = logging.getLogger(__name__)

LOOK_S = 0.5
REST = 99  # pause after a look, in times of its duration: thousands of connections take a while
_DESCRIPTORS = Path("/proc/self/fd")

Peer = tuple[str, int]
MOST_CONNECTIONS = 2**14
RESERVED = 256  # descriptors for files, slots and rings; at least a quarter of the limit


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of a server.

    Attributes:
        total: Number of all connections; the server closes further ones.
        strangers: Number of connections without a valid token so far, from all addresses.
        strangers_of_one: Number of connections without a valid token so far, from one address.
        stranger_s: Longest time that a connection may stay without a token, in seconds.
    """

    total: int = 2**14
    strangers: int = 256
    strangers_of_one: int = 64
    stranger_s: float = 10.0

    @classmethod
    def of(cls, total: int) -> ConnectionLimits:
        """Return limits for so many connections, at most half of them without a token."""
        half = max(1, total // 2)
        return cls(total, min(cls.strangers, half), min(cls.strangers_of_one, half))


@dataclass
class _TrackedConnection:
    descriptor: int
    peer: Peer
    since: float


class Doorkeeper:
    """Watches the connections of one server on a thread of its own.

    Attributes:
        ports: Ports that the server listens on.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.ports: set[int] = set()
        self._limits = limits
        self._known: dict[str, Peer] = {}  # by grpcio's name of the peer
        self._connections: dict[int, _TrackedConnection | None] = {}  # by inode; None: not a socket of the server
        self._stopped = threading.Event()
        self._warnings = Seldom(_log)

    def start(self) -> None:
        """Start the watching thread."""
        if _DESCRIPTORS.is_dir():
            threading.Thread(target=self._watch, name="doorkeeper", daemon=True).start()

    def stop(self) -> None:
        """Stop the watching thread."""
        self._stopped.set()

    def admit(self, context: Any) -> None:
        """Mark the connection of this call as known, because a valid token has arrived on it."""
        name = context.peer()
        if name not in self._known and (peer := _peer(name)) is not None:
            self._known[name] = peer

    def admit_address(self, host: str, port: int) -> None:
        """Mark the connection from this address as known, because something that is valid has arrived on it."""
        self._known.setdefault(f"{host} {port}", (_normal(host), port))

    def _watch(self) -> None:
        took_s = 0.0
        while not self._stopped.wait(max(LOOK_S, REST * took_s)):
            began = time.monotonic()
            try:
                self._look(began)
            except OSError as error:  # no descriptor is free for the inspection
                self._warnings.warn("connections could not be looked at: %s", error)
            took_s = time.monotonic() - began

    def _look(self, now: float) -> None:
        known = dict(self._known)  # copied first: peers that are added later have a connection that is found below
        living = [connection for connection in self._find(now) if connection is not None]
        peers = {connection.peer for connection in living}
        for name, peer in known.items():
            if peer not in peers:
                self._known.pop(name, None)
        familiar = set(known.values())
        self._limit([connection for connection in living if connection.peer not in familiar], now)

    def _find(self, now: float) -> list[_TrackedConnection | None]:
        found: dict[int, _TrackedConnection | None] = {}
        for descriptor, inode in _sockets():
            if inode in self._connections:
                found[inode] = self._connections[inode]
            else:
                peer = self._peer_of(descriptor)
                found[inode] = _TrackedConnection(descriptor, peer, now) if peer else None
        self._connections = found
        return list(found.values())

    def _peer_of(self, descriptor: int) -> Peer | None:
        """Return the peer of a connection to this server, or None for any other socket."""
        # OSError: it was closed in the meantime, or it is the socket that listens, which has no peer.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] in self.ports:
                host, port = one.getpeername()[:2]
                return _normal(host), port
        return None

    def _limit(self, strangers: list[_TrackedConnection], now: float) -> None:
        """Close strangers beyond the limits, oldest first: a client with a token sends it soon."""
        limits, total = self._limits, len(strangers)
        held = Counter(connection.peer[0] for connection in strangers)
        for one in sorted(strangers, key=lambda connection: connection.since):
            host = one.peer[0]
            late = now - one.since >= limits.stranger_s
            if late or held[host] > limits.strangers_of_one or total > limits.strangers:
                self._warnings.warn("connection from %s without a token is closed", host)
                self._shut_down(one)
                held[host] -= 1
                total -= 1

    def _shut_down(self, connection: _TrackedConnection) -> None:
        if self._peer_of(connection.descriptor) != connection.peer:
            return  # already closed by the peer
        try:
            with socket.socket(fileno=os.dup(connection.descriptor)) as one:
                one.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("connection from %s: %s", connection.peer[0], error)


def _sockets() -> Iterator[tuple[int, int]]:
    """Yield (descriptor, inode) of every socket of this process."""
    for name in os.listdir(_DESCRIPTORS):
        try:
            status = os.fstat(int(name))
        except OSError:  # closed meanwhile
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(name), status.st_ino


def _normal(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _peer(name: str) -> Peer | None:
    """Return host and port of a peer that grpcio names ``ipv4:1.2.3.4:5`` or ``ipv6:%5B::1%5D:5``, or None."""
    host, _, port = unquote(name.partition(":")[2]).rpartition(":")
    try:
        return _normal(host.removeprefix("[").removesuffix("]")), int(port)
    except ValueError:
        return None


class GuardedServer:
    """A ``grpc.Server`` that starts and stops a doorkeeper, which watches every port; all else is the server's own."""

    def __init__(self, server: grpc.Server, doorkeeper: Doorkeeper) -> None:
        self._server, self._doorkeeper = server, doorkeeper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def add_insecure_port(self, address: str) -> int:
        """Listen in plain text; return the port."""
        port = self._server.add_insecure_port(address)
        self._doorkeeper.ports.add(port)
        return port

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Listen with TLS; return the port."""
        port = self._server.add_secure_port(address, server_credentials)
        self._doorkeeper.ports.add(port)
        return port

    def start(self) -> None:
        """Start the server, then the doorkeeper."""
        self._server.start()
        self._doorkeeper.start()

    def stop(self, grace: float | None = None) -> threading.Event:
        """Stop the doorkeeper and the server; return an event that is set when the server has stopped."""
        self._doorkeeper.stop()
        return self._server.stop(grace)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the hard limit; processes that it starts inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS reports infinity but allows less
        return


def most_connections() -> int:
    """Return the number of connections that leaves enough descriptors for the files of jobs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, soft - max(RESERVED, soft // 4)))
