"""Rank 0: registers at the job server and broadcasts every instruction, which all ranks execute together.

Rank 0 acts as the worker and the shard of its ranks; the other ranks have no connection to the server. Rank 0 of a
group is a worker only, and communicates with the shards. In a ring with a fixed set of ranks rank 0 leads to the end.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hfdt.runtime.artifacts import share
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.group_step import connect
from hfdt.runtime.ring import Command, RingMember
from hfdt.runtime.slot_connection import LOOK_S, SlotConnection, leave_failure, report_failure, watch_failures
from hfdt.runtime.state_service import StateService
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.heartbeat import Heartbeat
from nfdt.core.work.messages import read_instruction, to_request
from nfdt.transport.base import ParameterClient

logger = logging.getLogger(__name__)

WAIT_S = 10.0  # longest time between two broadcasts
LINGER_S = 10.0
BLAME_S = 3.0


class Leader:
    """Rank 0: connects the job server and the ranks of a ring.

    All its state is in attributes, so that an elastic ring can call :meth:`run` again after ranks joined or left.

    Args:
        ring: This rank.
        connection: Registration at the job server.
        members: Numbers of the members of a group among the job's workers, by rank.
    """

    roles: tuple[str, ...] = ("shard", "worker")  # a job begins with an assignment of the first one

    def __init__(self, ring: RingMember, connection: SlotConnection, members: Sequence[int] = ()) -> None:
        self._ring, self._connection, self._members = ring, connection, tuple(members)
        self._wait_s = broadcast_interval_s(os.environ)
        self._dismissed = False
        self._reset()

    def _reset(self) -> None:
        """Return to the state between two jobs."""
        self._assignment: Any = None
        self._started = self._left = False
        self._service: StateService | None = None
        self._worker = ""  # name of the ranks as a worker
        self._incarnation = 0  # of the shards of a group
        self._report = ins.Report()  # to be sent with the next request

    def run(self) -> None:
        """Serve jobs until dismissed."""
        while not (self._dismissed and self._assignment is None):
            self._advance()
        self._ring.broadcast(Command("quit"))

    def close(self) -> None:
        """Stop serving the state of the job."""
        if self._service is not None:
            self._service.stop()

    def _advance(self) -> None:
        """Perform the next action."""
        if self._assignment is None:
            self._assignment = self._next_assignment(self.roles[0])
            if self._assignment is not None:
                self._connection.begin_job(self._assignment.job_id)
        elif not self._started:
            self._start_job(self._assignment)
            self._started = True
        elif self._connection.stopped.is_set():
            self._end_job()
        elif not self._worker:
            assignment = self._next_assignment("worker")
            if assignment is not None and assignment.job_id == self._connection.job_id:
                self._start_work(assignment)
        elif self._left:
            # The coordinator reads the state after the last step: the job ends with its release.
            self._connection.stopped.wait(self._wait_s)
            self._ring.broadcast(Command("idle"))
        else:
            self._exchange()

    def _next_assignment(self, role: str) -> Any:
        """Return the next assignment if it is one of this role; None if it is another one, or none arrives in time."""
        assignment = self._connection.next_assignment(self._wait_s)
        if assignment is None:
            self._ring.broadcast(Command("idle"))
            return None
        kind = assignment.WhichOneof("assignment")
        self._dismissed |= kind == "dismiss"
        return getattr(assignment, role) if kind == role else None

    def _start_job(self, assignment: Any) -> None:
        """Build the job on all ranks, and serve its state."""
        self._build(assignment)
        self._service = StateService(self._ring.job.step, assignment, self._connection)
        ready = pb.SlotReady(job_id=assignment.job_id, address=self._service.address)
        self._connection.send("shard", ready=ready)

    def _build(self, assignment: Any, **more: Any) -> None:
        job_id = assignment.job_id
        if self._ring.job_id != job_id:  # an elastic ring has it already if its last leader was lost
            values = {"id": job_id, "spec": assignment.spec_json, "artifacts": assignment.artifact_dir, **more}
            self._run_command(Command("job", values))

    def _start_work(self, assignment: pb.WorkerAssignment) -> None:
        self._worker, self._incarnation = assignment.worker, assignment.incarnation
        busy = pb.NextRequest(worker=self._worker, busy=True, incarnation=self._incarnation)
        job = self._ring.job
        job.advanced = Heartbeat(lambda: self._connection.ask(busy), job.spec.busy_report_s)
        self._connection.send("worker", ready=pb.SlotReady(job_id=assignment.job_id))

    def _end_job(self) -> None:
        job_id = self._connection.job_id
        self.close()
        self._run_command(Command("release"))
        self._reset()
        for role in reversed(self.roles):
            self._connection.send(role, finished=pb.SlotFinished(job_id=job_id))

    def _exchange(self) -> None:
        """Send the last report, and let all ranks execute the instruction that the coordinator replies."""
        request = to_request(self._report)
        request.worker, request.incarnation, request.wait_s = self._worker, self._incarnation, self._wait_s
        request.statistics_json = json.dumps(self._ring.statistics())
        reply = self._connection.ask(request)
        self._report = ins.Report()
        instruction = read_instruction(reply)
        if isinstance(instruction, ins.Leave):
            self._leave()
        elif isinstance(instruction, ins.Wait):
            self._ring.broadcast(Command("idle"))
        elif isinstance(instruction, ins.Summarise):
            self._report = self._ring.job.summarise(instruction)
        else:
            self._execute(reply)

    def _leave(self) -> None:
        self._left = True

    def _execute(self, reply: pb.NextReply) -> None:
        rate, state = (None, b"") if self._service is None else self._service.pop_changes()
        values = {} if rate is None else {"learning_rate": rate}
        self._run_command(Command("do", values, reply.SerializeToString(), state))

    def _run_command(self, command: Command) -> None:
        self._report = self._ring.broadcast(command)
        if self._service is not None and self._ring.job is not None:
            self._service.version = self._ring.job.steps


class GroupLeader(Leader):
    """Rank 0 of a group: a worker whose weights are on the shards, so that the group ends when it has no more work."""

    roles = ("worker",)
    _client: ParameterClient | None = None

    def close(self) -> None:
        """Disconnect from the shards."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _start_job(self, assignment: pb.WorkerAssignment) -> None:
        self._build(assignment, members=self._members)
        job, number, stopped = self._ring.job, self._members[0], self._connection.stopped
        options = {"spec": job.spec, "number": number, "stopped": stopped, "insecure": self._connection.insecure}
        self._client = connect(assignment, job.step.layout, **options)
        job.exchange.client = self._client
        self._start_work(assignment)

    def _leave(self) -> None:
        self._end_job()


def broadcast_interval_s(environment: Mapping[str, str]) -> float:
    """Return the longest time between two broadcasts: below the time after which Horovod warns of stalled ranks."""
    text = environment.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "")
    return min(WAIT_S, (float(text) if text.isdigit() and int(text) else 60.0) / 2)


def run_launched_rank(communicator: Communicator, options: argparse.Namespace) -> None:
    """Run as a rank that a launcher has started, until the end."""
    path = str(options.ring).encode() if communicator.leads else None
    directory = Path(communicator.broadcast(path).decode())
    ring = RingMember(communicator, functools.partial(share, communicator))
    if communicator.leads:
        lead(ring, options.server, directory, options.members)
    else:
        follow(ring, directory, lingers=options.watch_stdin)


def lead(ring: RingMember, server: str, directory: Path, members: Sequence[int] = ()) -> None:
    """Run as rank 0, of a ring or of the group with these members."""
    kind = GroupLeader if members else Leader
    connection = SlotConnection.of_ring(directory, server, kind.roles)
    failure_reported = watch_failures(directory, connection)
    try:
        kind(ring, connection, members).run()
    except Exception as error:
        logger.exception("rank 0 failed")
        if ring.communicator.is_broken(error):
            failure_reported.wait(BLAME_S)  # another rank has the reason; otherwise the launcher's log has it
        else:
            report_failure(directory, connection, 0, error)
        connection.stopped.wait(BLAME_S)
        raise
    connection.close()


def follow(ring: RingMember, directory: Path, *, lingers: bool) -> None:
    """Run as a rank other than 0.

    Args:
        ring: This rank.
        directory: Directory of the ring.
        lingers: Whether the end of this rank would end rank 0's script before it has read the failure.
    """
    try:
        ring.follow()
    except Exception as error:
        rank = ring.communicator.rank
        logger.exception("rank %d failed", rank)
        if not ring.communicator.is_broken(error):
            leave_failure(directory, rank, error)
        elif not lingers:
            threading.Event().wait(BLAME_S)  # the launcher should see the end of the lost rank first
        if lingers:
            _await_removal(directory)
        raise


def _await_removal(directory: Path) -> None:
    """Wait until the server and its directory are gone, up to a deadline."""
    pause = threading.Event()
    for _ in range(round(LINGER_S / LOOK_S)):
        if not directory.exists() or pause.wait(LOOK_S):
            return
