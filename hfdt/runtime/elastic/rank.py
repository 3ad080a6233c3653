"""One rank of a ring that Horovod's elastic launcher started: it survives the loss of other ranks.

The leader resumes the interrupted work after a loss.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from horovod.common.elastic import run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util import network

from hfdt.horovodrun import find_loopback_port
from hfdt.keras.horovod_api import enter_next_world, is_broken_world
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.elastic.state import RingState
from hfdt.runtime.execution import Command
from hfdt.runtime.leader import beat, broadcast_interval_s, leader_request
from hfdt.runtime.slot_connection import FailureWatch, SlotConnection, failure_of, leave_failure
from hfdt.runtime.state_service import StateService
from nfdt.core.specs.horovod_options import NEWS
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_instruction

logger = logging.getLogger(__name__)

BLAME_S = 3.0


class ElasticLeader:
    """Connection between the job server and the ring; :meth:`run` is called again with every new communicator.

    Args:
        state: State of the ring.
        connection: Registration at the job server.
        wait_s: Longest time between two broadcasts.
    """

    def __init__(self, state: RingState, connection: SlotConnection, wait_s: float) -> None:
        self._state, self._connection, self._wait_s = state, connection, wait_s
        self._dismissed = False
        self._begun: pb.ShardAssignment | None = None
        self._service: StateService | None = None
        self._worker = ""
        self._command: Command | None = None  # broadcast, but not yet executed by all ranks
        self._answer: ins.Report | None = None

    def run(self) -> None:
        """Serve jobs until dismissed; raises when ranks join or leave."""
        self._answer = self._pending()
        while not (self._dismissed and self._begun is None):
            self._go_on()
        self._broadcast(Command("quit"))

    def _pending(self) -> ins.Report | None:
        return self._state.job.pending if self._state.job is not None and self._command is None else None

    def _go_on(self) -> None:
        """Perform the next action."""
        if self._command is not None:
            self._run_command(self._command)
        elif self._begun is None:
            self._on_free(self._next_assignment())
        elif self._service is None:
            self._engage(self._begun)
        elif self._connection.stopped.is_set():
            self._release()
        elif not self._worker:
            self._on_engaged(self._next_assignment())
        else:
            self._exchange(self._state.job)

    def _next_assignment(self) -> pb.Assignment | None:
        assignment = self._connection.next_assignment(self._wait_s)
        if assignment is None:
            self._broadcast(Command("idle"))
        return assignment

    def _broadcast(self, command: Command) -> ins.Report:
        self._state.communicator.broadcast(command.encode())
        return self._state.execute(command)

    def _run_command(self, command: Command) -> None:
        """Execute a command on all ranks; :meth:`run` repeats it if ranks join or leave meanwhile."""
        self._command = command
        self._answer = self._broadcast(command)
        self._command = None
        if self._service is not None and self._state.job is not None:
            self._service.version = self._state.job.steps

    def _on_free(self, assignment: pb.Assignment | None) -> None:
        kind = assignment.WhichOneof("assignment") if assignment else None
        self._dismissed |= kind == "dismiss"
        if assignment is not None and kind == "shard":
            self._begun = assignment.shard
            self._connection.begin(assignment.shard.job_id)

    def _engage(self, begun: pb.ShardAssignment) -> None:
        """Build the job, unless this ring already has it, and serve its state."""
        values = {"id": begun.job_id, "spec": begun.spec_json, "artifacts": begun.artifact_dir}
        if not self._state.has(begun.job_id):
            self._run_command(Command("job", values))
        assert self._state.job is not None
        self._answer = self._pending()
        self._service = StateService(self._state.job.step, begun, self._connection.host)
        self._connection.send("shard", ready=pb.SlotReady(job_id=begun.job_id, address=self._service.address))

    def _on_engaged(self, assignment: pb.Assignment | None) -> None:
        kind = assignment.WhichOneof("assignment") if assignment else None
        self._dismissed |= kind == "dismiss"
        if assignment is not None and kind == "worker" and assignment.worker.job_id == self._connection.job_id:
            self._worker = assignment.worker.worker
            self._beat()
            self._connection.send("worker", ready=pb.SlotReady(job_id=self._connection.job_id))

    def _beat(self) -> None:
        """Send heartbeats to the server as the job advances."""
        job = self._state.job
        assert job is not None
        job.advanced = beat(self._connection, job, self._worker)

    def _exchange(self, job: Any) -> None:
        totals = job.statistics(resets=self._state.resets, redone_steps=self._state.redone)
        request = leader_request(self._answer or ins.Report(), self._worker, self._wait_s, totals)
        reply = self._connection.ask(request)
        self._answer = None
        instruction = read_instruction(reply)
        if isinstance(instruction, ins.Leave):
            self._connection.stopped.wait(self._wait_s)
            self._broadcast(Command("idle"))
        elif isinstance(instruction, ins.Wait):
            self._broadcast(Command("idle"))
        elif isinstance(instruction, ins.Summarise):
            self._answer = job.summarise(instruction)
        else:
            assert self._service is not None
            self._run_command(self._service.command(reply))
            self._broadcast(Command("idle"))

    def _release(self) -> None:
        if self._service is not None:
            self._service.stop()
        job_id = self._connection.job_id
        self._run_command(Command("release"))
        self._begun, self._service, self._worker, self._answer = None, None, "", None
        for role in ("worker", "shard"):
            self._connection.send(role, finished=pb.SlotFinished(job_id=job_id))

    def log_members(self) -> None:
        """Log the present ranks, for the job's events."""
        state = self._state
        if state.resets:
            done = f"; {state.redone} steps in all were done again" if state.redone else ""
            logger.warning("%sranks came or went: %d are there now%s", NEWS, state.communicator.size, done)
        else:
            logger.info("%d ranks, process %d leads", state.communicator.size, os.getpid())


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
