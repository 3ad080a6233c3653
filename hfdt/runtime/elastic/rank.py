"""One rank of a ring that Horovod's elastic launcher started: it survives the loss of other ranks."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util import network

from hfdt.keras.horovod_api import enter_next_world, is_broken_world
from hfdt.launch.horovodrun import find_loopback_port
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.elastic.leader import ElasticLeader
from hfdt.runtime.elastic.state import RingState
from hfdt.runtime.execution import Command
from hfdt.runtime.leader import broadcast_interval_s
from hfdt.runtime.slot_connection import FailureWatch, SlotConnection, failure_of, leave_failure

logger = logging.getLogger(__name__)

BLAME_S = 3.0


class ElasticRank:
    """One process of the ring, through all communicators that it joins.

    Args:
        communicator: The initial ranks.
        server: ``host:port`` of the job server; "" if it is not known.
        directory: Directory of the ring, with the token.
    """

    def __init__(self, communicator: Communicator, server: str, directory: Path | None) -> None:
        self._communicator, self._server = communicator, server
        reaches = bool(server) and directory is not None and os.access(directory / "token", os.R_OK)
        self._state = RingState(communicator, directory, reaches_server=reaches)
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
            run_fn(self._work, self._enter_next_world)(self._state)
        except Exception as error:
            if error is not self._lost:
                self._report_failure(error)
            raise
        if self._connection is not None:
            self._connection.close()

    def _enter_next_world(self) -> None:
        self._state.leaving()
        try:
            enter_next_world()
        except Exception as error:
            self._lost = error
            logger.error("no further world for this rank: %s", error)
            raise

    def _work(self, state: RingState) -> None:
        try:
            state.rendezvous()
            if state.leads:
                self._lead()
            else:
                self._follow()
        except Exception as error:
            if is_broken_world(error):
                raise HorovodInternalError(str(error)) from error
            raise

    def _lead(self) -> None:
        if self._leader is None:
            directory = self._state.directory
            assert directory is not None
            token = (directory / "token").read_text().strip()
            self._connection = SlotConnection(self._server, token, directory.name)
            wait_s = broadcast_interval_s(os.environ)
            self._leader = ElasticLeader(self._state, self._connection, wait_s)
            FailureWatch(directory, self._connection, own=None)
        self._leader.log_members()
        self._leader.run()

    def _follow(self) -> None:
        while (command := Command.decode(self._communicator.broadcast())).kind != "quit":
            self._state.execute(command)

    def _report_failure(self, error: BaseException) -> None:
        """Report the exception of this rank to the server, which then ends the job."""
        logger.exception("rank %d failed", self._communicator.rank)
        connection: Any = self._connection
        if self._state.directory is not None:
            leave_failure(self._state.directory, self._communicator.rank, error)
        if connection is not None and connection.job_id and not connection.stopped.is_set():
            connection.send("worker", failed=failure_of(connection.job_id, error, self._communicator.rank))
            connection.stopped.wait(BLAME_S)
