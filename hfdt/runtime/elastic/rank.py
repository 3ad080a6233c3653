"""One rank of a ring that Horovod's elastic launcher started: it survives the loss of other ranks.

The leader resumes the interrupted work after a loss.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from horovod.runner.common.util import network

from hfdt.horovodrun import find_loopback_port
from hfdt.keras.elastic import run_in_worlds
from hfdt.keras.horovod_api import enter_next_world
from hfdt.runtime.elastic.ring import ElasticMember
from hfdt.runtime.leader import BLAME_S, Leader
from hfdt.runtime.ring import Command
from hfdt.runtime.slot_connection import SlotConnection, report_failure, watch_failures
from hfdt.runtime.tensorflow_ranks import HorovodRanks
from nfdt.core.specs.horovod_options import NEWS
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins

logger = logging.getLogger(__name__)


class ElasticLeader(Leader):
    """Rank 0 of an elastic ring; :meth:`run` is called again with every new communicator."""

    _ring: ElasticMember
    _command: Command | None = None  # broadcast, but not yet executed by all ranks

    def run(self) -> None:
        """Serve jobs until dismissed; raises when ranks join or leave."""
        self._log_members()
        # A lost leader may not have sent the report of the last commit.
        self._report = ins.Report() if self._command is not None else self._ring.pending
        super().run()

    def _advance(self) -> None:
        if self._command is not None:
            self._run_command(self._command)
        else:
            super()._advance()

    def _run_command(self, command: Command) -> None:
        self._command = command  # repeated if ranks join or leave meanwhile
        super()._run_command(command)
        self._command = None

    def _execute(self, reply: pb.NextReply) -> None:
        super()._execute(reply)
        self._ring.broadcast(Command("idle"))  # the work is committed: new ranks may join

    def _log_members(self) -> None:
        """Log the present ranks, for the job's events."""
        ring = self._ring
        if ring.resets:
            repeated = f"; {ring.redone} steps in all were done again" if ring.redone else ""
            gone = f", without {', '.join(f'a rank on {host}' for host in ring.gone)}" if ring.gone else ""
            logger.warning("%sranks came or went: %d are there now%s%s", NEWS, ring.communicator.size, gone, repeated)
        else:
            logger.info("%d ranks, process %d leads", ring.communicator.size, os.getpid())


class ElasticRank:
    """One process of the ring, through all communicators that it joins.

    Args:
        communicator: The initial ranks.
        server: ``host:port`` of the job server; "" if it is not known.
        directory: Directory of the ring, with the token.
    """

    def __init__(self, communicator: HorovodRanks, server: str, directory: Path | None) -> None:
        self._server = server
        reaches = bool(server) and directory is not None and os.access(directory / "token", os.R_OK)
        self._ring = ElasticMember(communicator, directory, reaches_server=reaches)
        self._leader: ElasticLeader | None = None
        self._connection: SlotConnection | None = None
        self._lost: BaseException | None = None

    def run(self) -> None:
        """Participate until the command to quit.

        Raises:
            Exception: the exception of the user's code, or the reason why this rank cannot continue.
        """
        if os.environ.get("HOROVOD_GLOO_IFACE") == "lo":
            network.find_port = find_loopback_port  # of the service that receives host updates
        try:
            run_in_worlds(self._work, self._enter_next_world)(self._ring)
        except Exception as error:
            if error is not self._lost:
                self._report_failure(error)
            raise
        if self._connection is not None:
            self._connection.close()

    def _enter_next_world(self) -> None:
        self._ring.leaving()
        try:
            enter_next_world()
        except Exception as error:
            self._lost = error
            logger.error("no further world for this rank: %s", error)
            raise

    def _work(self, ring: ElasticMember) -> None:
        ring.rendezvous()
        if ring.leads:
            self._lead()
        else:
            ring.follow()

    def _lead(self) -> None:
        if self._leader is None:
            directory = self._ring.directory
            assert directory is not None
            self._connection = SlotConnection.of_ring(directory, self._server, ElasticLeader.roles)
            self._leader = ElasticLeader(self._ring, self._connection)
            watch_failures(directory, self._connection)
        self._leader.run()

    def _report_failure(self, error: BaseException) -> None:
        """Report the exception of this rank to the server, which then ends the job."""
        # Horovod would start the rank again, which would raise again, and the traceback would be lost.
        rank = self._ring.communicator.rank
        logger.exception("rank %d failed", rank)
        if self._ring.directory is not None:
            report_failure(self._ring.directory, self._connection, rank, error)
        if self._connection is not None:
            self._connection.stopped.wait(BLAME_S)
