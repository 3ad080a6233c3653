"""One rank of an elastic ring in a worker slot: it survives the loss of other ranks, in worlds that the server forms.

::

    join ──> rendezvous ──> work ──a rank is lost, or one more joins──> leave ──report──> await the next world ──> join
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from hfdt.keras.horovod_api import break_off, init, is_broken_world, leave_world
from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.elastic.rank import ElasticLeader
from hfdt.runtime.elastic.ring import ElasticMember
from hfdt.runtime.slot_connection import SlotConnection
from hfdt.runtime.tensorflow_ranks import HorovodRanks
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.rank_worlds import RankWorlds
from nfdt.core.work.spans import SpanRing

logger = logging.getLogger(__name__)


class WorldOver(Exception):  # noqa: N818
    """This rank leaves its world because the server forms another one."""


class SlotMember(ElasticMember):
    """One rank, which leaves its world at a commit when the server asks the leader for it.

    Args:
        communicator: The ranks.
        open_artifacts: Makes the artifacts of a job readable.
        spans: Records what this rank does.
        worlds: Messages of the server.
    """

    def __init__(
        self, communicator: HorovodRanks, open_artifacts: OpenArtifacts, spans: SpanRing, worlds: RankWorlds
    ) -> None:
        super().__init__(communicator, None, reaches_server=True, open_artifacts=open_artifacts, spans=spans)
        self._worlds = worlds

    def check_host_updates(self) -> None:
        """Leave the world, with all other ranks, if the leader was asked to; collective.

        Raises:
            WorldOver: the ranks leave.
        """
        order = (b"leave" if self._worlds.leaving else b"stay") if self.leads else None
        if self.communicator.broadcast(order) == b"leave":
            raise WorldOver


class ElasticSlotRank:
    """One process of the ring, through all worlds that it joins.

    Args:
        meet: Context in which Horovod joins the world of an assignment.
        connect: Registers the leader at the job server.
        report: Reports that this rank has joined a world, or left it.
        worlds: Messages of the server.
    """

    def __init__(
        self,
        meet: Callable[[pb.RankAssignment], AbstractContextManager[None]],
        connect: Callable[[], SlotConnection],
        report: Callable[..., None],
        worlds: RankWorlds,
    ) -> None:
        self._meet, self._connect, self._report, self._worlds = meet, connect, report, worlds
        self._connection: SlotConnection | None = None
        self._leader: ElasticLeader | None = None

    def run(self, assignment: pb.RankAssignment, open_artifacts: OpenArtifacts, spans: SpanRing) -> None:
        """Participate until the command to quit.

        Raises:
            Exception: the exception of the user's code.
        """
        with self._meet(assignment):
            communicator = HorovodRanks()
        communicator.share_machine()
        ring = SlotMember(communicator, open_artifacts, spans, self._worlds)
        self._worlds.break_off = break_off
        try:
            while not self._worked(ring):
                self._enter_next(ring)
        finally:
            self._worlds.break_off = lambda: None
            if self._leader is not None:
                self._leader.close()
            if self._connection is not None:
                self._connection.close()
        communicator.close()

    def _worked(self, ring: SlotMember) -> bool:
        """Work in the current world; return whether that was up to the command to quit."""
        try:
            if self._worlds.broken:  # while this rank joined
                return False
            self._report()
            ring.rendezvous()
            if ring.leads:
                self._lead(ring)
            else:
                ring.follow()
        except Exception as error:
            if not (isinstance(error, WorldOver) or is_broken_world(error)):
                raise
            logger.info("this rank leaves its world: %s", error)
            return False
        return True

    def _lead(self, ring: SlotMember) -> None:
        if self._leader is None:
            self._connection = self._connect()
            self._leader = ElasticLeader(ring, self._connection)
        self._leader.run()

    def _enter_next(self, ring: SlotMember) -> None:
        """Leave the world, and join the next one that can be joined."""
        ring.leaving()
        while True:
            leave_world()
            self._report(left=True)
            assignment = self._worlds.await_next()
            try:
                with self._meet(assignment):
                    init()
            except Exception as error:  # a rank was lost meanwhile, and the server forms another world
                logger.warning("rank %d could not join the other ranks: %s", assignment.rank, error)
                continue
            ring.reset()
            return
