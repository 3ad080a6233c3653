"""A worker slot as one rank of a ring; each rank has its own connection to the job server, also for the rendezvous.

Horovod's own stores for the rendezvous of Gloo are HTTP servers without a password, open to the network.
The relay in this process answers only its own connections on loopback, and forwards them over the connection to the
job server, which has a token and TLS.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import psutil

from hfdt.keras.horovod_api import is_broken_world
from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.communicator import Communicator, share_machine
from hfdt.runtime.execution import Follower
from hfdt.runtime.leader import make_leader, roles_of
from hfdt.runtime.slot_connection import SlotConnection
from nfdt.core.errors import NfdtError, ServerUnreachable, UsageError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import LOOPBACK
from nfdt.core.wire.status import translated
from nfdt.core.work.spans import SpanRing

REQUEST_S = 10.0  # limit of one request
MOST_BYTES = 2**22  # of one value

Exchange = Callable[[str, bytes | None], bytes | None]
"""Stores a value under a key, or with None returns the value, None if there is none."""


class RendezvousRelay:
    """Store that serves while it is entered.

    Args:
        exchange: Access to the values.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._server = _RelayServer((LOOPBACK, 0), exchange)
        self._thread = threading.Thread(target=self._server.serve_forever, name="rendezvous", daemon=True)

    @property
    def port(self) -> int:
        """Port on loopback."""
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        """Begin to serve."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


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
        value = self.rfile.read(int(size))
        self._forward(value)

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


logger = logging.getLogger(__name__)

RENDEZVOUS_S = 20.0  # limit of one call


@dataclass(frozen=True)
class ServerAccess:
    """Access of a slot to its job server.

    Attributes:
        address: ``HOST:PORT``.
        token: Token of the server.
        tls: ``ca_file``, ``cert_file``, ``key_file`` of :func:`nfdt.core.wire.channel.open_channel`.
        host: Address of this machine at which others reach the slot.
        stub: Stub of the Workers service.
    """

    address: str
    token: str = field(repr=False)
    tls: Mapping[str, Any]
    host: str
    stub: Any


def run_rank(
    assignment: pb.RankAssignment,
    server: ServerAccess,
    open_artifacts: OpenArtifacts,
    joined: Callable[[], None],
    spans: SpanRing,
) -> None:
    """Run as a rank until the ring ends.

    Args:
        assignment: Place of the rank.
        server: The job server.
        open_artifacts: Opens the artifacts of the job.
        joined: Called when all ranks are connected.
        spans: Takes what this rank does.

    Raises:
        ServerUnreachable: The connection to the other ranks is lost.
    """
    try:
        communicator = _join(assignment, server)
        joined()
        share_machine(communicator, assignment.neighbours)
        if communicator.leads:
            _lead(communicator, assignment, server, open_artifacts, spans)
        else:
            Follower(communicator, open_artifacts, spans).run()
        communicator.close()
    except Exception as error:
        if is_broken_world(error):
            raise ServerUnreachable(f"Rank {assignment.rank} has lost the other ranks: {error}") from error
        raise


def _join(assignment: pb.RankAssignment, server: ServerAccess) -> Communicator:
    def exchange(key: str, value: bytes | None) -> bytes | None:
        request = pb.RendezvousRequest(ring=assignment.ring, secret=assignment.secret, key=key, value=value)
        with translated(server.address):
            reply = server.stub.Rendezvous(request, timeout=RENDEZVOUS_S)
        return reply.value if reply.HasField("value") else None

    os.environ.update(assignment.environment)
    os.environ["HOROVOD_GLOO_IFACE"] = interface_of(assignment.host or LOOPBACK)
    with RendezvousRelay(exchange) as relay:
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = LOOPBACK
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(relay.port)
        try:
            return Communicator()
        except NfdtError:  # Horovod is not installed
            raise
        except Exception as error:
            raise ServerUnreachable(f"Rank {assignment.rank} could not join the other ranks: {error}") from error


def _lead(
    communicator: Communicator,
    assignment: pb.RankAssignment,
    server: ServerAccess,
    open_artifacts: OpenArtifacts,
    spans: SpanRing,
) -> None:
    members = tuple(assignment.members)
    connection = SlotConnection(
        server.address, server.token, assignment.ring, roles_of(members), tls=server.tls, host=server.host
    )
    try:
        make_leader(communicator, connection, open_artifacts, members, spans).run()
    finally:
        connection.close()


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address.

    Raises:
        UsageError: No interface of this machine has it.
    """
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    raise UsageError(
        f"Address {address} of this slot: expected one of an interface of its machine, for Gloo. "
        f"Received: interfaces {', '.join(sorted(interfaces))}. Give the slot such an address."
    )
