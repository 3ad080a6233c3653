"""One rank of a ring that Horovod's elastic launcher started: it outlives other ranks."""

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
from hfdt.runtime.attendance import Attendance, failure_of
from hfdt.runtime.commands import Order
from hfdt.runtime.communicator import World
from hfdt.runtime.elastic.leader import ElasticLeader
from hfdt.runtime.elastic.state import RingState
from hfdt.runtime.failures import FailureWatch, leave_failure
from hfdt.runtime.roles import WAIT_S, artifact_names, stall_warning_s

logger = logging.getLogger(__name__)

BLAME_S = 3.0


class ElasticRank:
    """This process in the ring, over all worlds that it takes part in.

    Args:
        world: The first one.
        server: ``host:port`` of the job server; "" where this rank does not know it.
        directory: The ring's, with the token.
    """

    def __init__(self, world: World, server: str, directory: Path | None) -> None:
        self._world, self._server = world, server
        attends = bool(server) and directory is not None and os.access(directory / "token", os.R_OK)
        self._state = RingState(world, directory, attends=attends, names=artifact_names)
        self._leader: ElasticLeader | None = None
        self._attendance: Attendance | None = None
        self._lost: BaseException | None = None

    def run(self) -> None:
        """Take part until the leader says quit.

        Raises:
            Exception: what the user's code raised, or why this rank cannot take part any more.
        """
        if os.environ.get("HOROVOD_GLOO_IFACE") == "lo":
            network.find_port = find_loopback_port  # of the service that is told of new hosts
        try:
            run_fn(self._work, self._enter_next_world)(self._state)
        except Exception as error:
            if error is not self._lost:
                self._blame(error)
            raise
        if self._attendance is not None:
            self._attendance.close()

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
            state.meet()
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
            self._attendance = Attendance(self._server, token, directory.name)
            wait_s = min(WAIT_S, stall_warning_s(os.environ) / 2)
            self._leader = ElasticLeader(self._state, self._attendance, wait_s)
            FailureWatch(directory, self._attendance, own=None)
        self._leader.tell_news()
        self._leader.run()

    def _follow(self) -> None:
        while (order := Order.decode(self._world.broadcast())).kind != "quit":
            self._state.obey(order)

    def _blame(self, error: BaseException) -> None:
        """Tell the server what this rank raised: that ends the job."""
        logger.exception("rank %d failed", self._world.rank)
        attendance: Any = self._attendance
        if self._state.directory is not None:
            leave_failure(self._state.directory, self._world.rank, error)
        if attendance is not None and attendance.job_id and not attendance.stopped.is_set():
            attendance.say("worker", failed=failure_of(attendance.job_id, error, self._world.rank))
            attendance.stopped.wait(BLAME_S)
