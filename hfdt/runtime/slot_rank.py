"""A worker slot as one rank of a ring; each rank has its own connection to the job server."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from hfdt.keras.horovod_api import is_broken_world
from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.communicator import Communicator, share_machine
from hfdt.runtime.elastic.rank import ElasticLeader
from hfdt.runtime.elastic.slot import ElasticSlotRank
from hfdt.runtime.leader import GroupLeader, Leader
from hfdt.runtime.rendezvous_relay import serve_rendezvous
from hfdt.runtime.ring import RingMember
from hfdt.runtime.slot_connection import SlotConnection
from nfdt.core.errors import NfdtError, ServerUnreachable, UsageError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import LOOPBACK, is_loopback
from nfdt.core.wire.status import translated
from nfdt.core.work.rank_worlds import RankWorlds
from nfdt.core.work.spans import SpanRing

logger = logging.getLogger(__name__)

RENDEZVOUS_S = 20.0  # limit of one call
RANK_AND_SIZE = "/rank_and_size/"


@dataclass(frozen=True)
class ServerAccess:
    """Access of a slot to its job server.

    Attributes:
        address: ``HOST:PORT``.
        token: Token of the server.
        tls: ``ca_file``, ``cert_file``, ``key_file``, ``insecure`` of :func:`nfdt.core.wire.channel.open_channel`.
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
    report: Callable[..., None],
    spans: SpanRing,
    worlds: RankWorlds,
) -> None:
    """Run as a rank until the ring ends.

    Args:
        assignment: Place of the rank.
        server: The job server.
        open_artifacts: Opens the artifacts of the job.
        report: Called when all ranks are connected, and with ``left=True`` when this one has left them.
        spans: Records what this rank does.
        worlds: Messages of the server about the worlds of an elastic ring.

    Raises:
        ServerUnreachable: The connection to the other ranks is lost.
    """
    try:
        if assignment.elastic:
            connect = partial(_connect, assignment, server, ElasticLeader.roles)
            ElasticSlotRank(partial(_meet, server), connect, report, worlds).run(assignment, open_artifacts, spans)
            return
        with _meet(server, assignment):
            communicator = Communicator()
        report()
        share_machine(communicator, assignment.neighbours)
        ring = RingMember(communicator, open_artifacts, spans)
        if communicator.leads:
            _lead(ring, assignment, server)
        else:
            ring.follow()
        communicator.close()
    except Exception as error:
        if is_broken_world(error):
            raise ServerUnreachable(f"Rank {assignment.rank} has lost the other ranks: {error}") from error
        raise


@contextmanager
def _meet(server: ServerAccess, assignment: pb.RankAssignment) -> Iterator[None]:
    """Provide the environment and the rendezvous with which Horovod joins the world of an assignment."""

    def exchange(key: str, value: bytes | None) -> bytes | None:
        if key.startswith(RANK_AND_SIZE):  # of an elastic Horovod, which asks again in each world
            return place_of(assignment.environment)
        request = pb.RendezvousRequest(ring=assignment.ring, secret=assignment.secret, key=key, value=value)
        with translated(server.address):
            reply = server.stub.Rendezvous(request, timeout=RENDEZVOUS_S)
        return reply.value if reply.HasField("value") else None

    os.environ.update(assignment.environment)
    os.environ["HOROVOD_GLOO_IFACE"] = interface_of(assignment.host or LOOPBACK)
    with serve_rendezvous(exchange) as port:
        os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = LOOPBACK
        os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        try:
            yield
        except NfdtError:  # Horovod is not installed
            raise
        except Exception as error:
            raise ServerUnreachable(f"Rank {assignment.rank} could not join the other ranks: {error}") from error


def place_of(environment: Mapping[str, str]) -> bytes:
    """Return the place of a rank as Horovod's elastic launcher would send it."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return ",".join(environment[f"HOROVOD_{name}"] for name in names).encode()


def _connect(assignment: pb.RankAssignment, server: ServerAccess, roles: Sequence[str]) -> SlotConnection:
    return SlotConnection(server.address, server.token, assignment.ring, roles, tls=server.tls, host=server.host)


def _lead(ring: RingMember, assignment: pb.RankAssignment, server: ServerAccess) -> None:
    kind = GroupLeader if assignment.members else Leader
    connection = _connect(assignment, server, kind.roles)
    leader = kind(ring, connection, assignment.members)
    try:
        leader.run()
    finally:
        leader.close()
        connection.close()


def interface_of(host: str) -> str:
    """Return the name of the network interface that has this address, or an address of this name.

    A name that also leads to loopback on its own machine, as Debian sets it up, counts by its other addresses.

    Raises:
        UsageError: No interface of this machine has it.
    """
    found = _addresses_of(host)
    wanted = {address for address in found if is_loopback(host) or not is_loopback(address)}
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(one.address.partition("%")[0] in wanted for one in addresses):
            return name
    raise UsageError(
        f"Address {host} of this slot: expected a name or an address of an interface of its machine, for Gloo. "
        f"Received: {', '.join(sorted(found)) or 'no address'}; the interfaces are {', '.join(sorted(interfaces))}. "
        "Give the slot such an address: `nfdt worker --host`, or `nfdt server --advertise` for slots of the server."
    )


def _addresses_of(host: str) -> set[str]:
    """Return the addresses of a host name; those of an address are itself."""
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return set()
