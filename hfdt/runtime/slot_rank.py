"""A worker slot as one rank of a ring; each rank has its own connection to the job server."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.communicator import ranks_of_backend
from hfdt.runtime.leader import GroupLeader, Leader
from hfdt.runtime.rendezvous_relay import Exchange
from hfdt.runtime.ring import RingMember
from hfdt.runtime.slot_connection import SlotConnection
from nfdt.core.errors import ServerUnreachable
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.status import translated
from nfdt.core.work.rank_worlds import RankWorlds
from nfdt.core.work.spans import SpanRing

RENDEZVOUS_S = 20.0  # limit of one call


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
    ranks = ranks_of_backend()
    try:
        if assignment.elastic:
            _run_elastic_rank(assignment, server, open_artifacts, report, spans, worlds)
            return
        communicator = ranks.join(assignment, _exchange(assignment, server))
        report()
        communicator.share_machine(assignment.neighbours)
        ring = RingMember(communicator, open_artifacts, spans)
        if communicator.leads:
            _lead(ring, assignment, server)
        else:
            ring.follow()
        communicator.close()
    except Exception as error:
        if ranks.is_broken(error):
            raise ServerUnreachable(f"Rank {assignment.rank} has lost the other ranks: {error}") from error
        raise


def _run_elastic_rank(
    assignment: pb.RankAssignment,
    server: ServerAccess,
    open_artifacts: OpenArtifacts,
    report: Callable[..., None],
    spans: SpanRing,
    worlds: RankWorlds,
) -> None:
    from hfdt.runtime.elastic.rank import ElasticLeader  # needs Horovod, as the others
    from hfdt.runtime.elastic.slot import ElasticSlotRank
    from hfdt.runtime.tensorflow_ranks import meeting

    def meet(assignment: pb.RankAssignment) -> AbstractContextManager[None]:
        return meeting(assignment, _exchange(assignment, server))

    connect = partial(_connect, assignment, server, ElasticLeader.roles)
    ElasticSlotRank(meet, connect, report, worlds).run(assignment, open_artifacts, spans)


def _exchange(assignment: pb.RankAssignment, server: ServerAccess) -> Exchange:
    """Return access to the rendezvous of a ring, and set the variables of this rank."""

    def exchange(key: str, value: bytes | None) -> bytes | None:
        request = pb.RendezvousRequest(ring=assignment.ring, secret=assignment.secret, key=key, value=value)
        with translated(server.address):
            reply = server.stub.Rendezvous(request, timeout=RENDEZVOUS_S)
        return reply.value if reply.HasField("value") else None

    os.environ.update(assignment.environment)
    return exchange


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
