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
from functools import partial
from pathlib import Path
from typing import Any

from hfdt.keras.horovod_api import is_broken_world
from hfdt.runtime.artifacts import OpenArtifacts, share
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.execution import Command, Follower, build_group_job, build_job, execute
from hfdt.runtime.outer import connect
from hfdt.runtime.slot_connection import LOOK_S, ROLES, FailureWatch, SlotConnection, failure_of, leave_failure
from hfdt.runtime.state_service import StateService
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.heartbeat import Heartbeat
from nfdt.core.work.messages import read_instruction, to_request
from nfdt.core.work.spans import SpanRing

WAIT_S = 10.0  # longest time between two broadcasts


class Leader:
    """Rank 0: connects the job server and the other ranks.

    Args:
        communicator: All ranks.
        connection: Registration at the job server.
        artifacts: Makes a job's artifacts readable.
        spans: Takes what this rank does.
    """

    role = "shard"  # the assignment that a job begins with

    def __init__(
        self,
        communicator: Communicator,
        connection: SlotConnection,
        artifacts: OpenArtifacts,
        spans: SpanRing | None = None,
    ) -> None:
        self._communicator, self._connection, self._artifacts = communicator, connection, artifacts
        self._spans = spans
        self._wait_s = broadcast_interval_s(os.environ)
        self._dismissed = False

    def run(self) -> None:
        """Serve jobs until dismissed."""
        while not self._dismissed:
            assignment = self._next_assignment()
            kind = assignment.WhichOneof("assignment")
            self._dismissed |= kind == "dismiss"
            if kind == self.role:
                self._serve(getattr(assignment, self.role))
        self._broadcast(Command("quit"))

    def _next_assignment(self) -> pb.Assignment:
        while (assignment := self._connection.next_assignment(self._wait_s)) is None:
            self._broadcast(Command("idle"))
        return assignment

    def _broadcast(self, command: Command) -> Command:
        self._communicator.broadcast(command.encode())
        return command

    def _serve(self, assignment: Any) -> None:
        job_id = assignment.job_id
        self._connection.begin(job_id)
        values = {"spec": assignment.spec_json, "artifacts": assignment.artifact_dir}
        job = build_job(self._communicator, self._broadcast(Command("job", values)), self._artifacts, self._spans)
        service = StateService(job.step, assignment, self._connection.host)
        try:
            self._connection.send("shard", ready=pb.SlotReady(job_id=job_id, address=service.address))
            name = self._await_worker(job_id)
            if name is not None:
                self._connection.send("worker", ready=pb.SlotReady(job_id=job_id))
                self._work(job, name, service)
                # The coordinator reads the state after the last step: the job ends with its release.
                while not self._connection.stopped.wait(self._wait_s):
                    self._broadcast(Command("idle"))
        finally:
            service.stop()
        self._broadcast(Command("release"))
        for role in ("worker", "shard"):
            self._connection.send(role, finished=pb.SlotFinished(job_id=job_id))

    def _await_worker(self, job_id: str) -> str | None:
        """Return the name of the ranks as a worker; None if the job ends before they have one."""
        while True:
            assignment = self._next_assignment()
            kind = assignment.WhichOneof("assignment")
            if kind == "worker" and assignment.worker.job_id == job_id:
                return assignment.worker.worker
            self._dismissed |= kind == "dismiss"
            if self._connection.stopped.is_set():
                return None

    def _work(self, job: Any, name: str, service: StateService | None = None) -> None:
        report = ins.Report()
        job.advanced = beat(self._connection, job, name)
        while not self._connection.stopped.is_set():
            request = leader_request(report, name, self._wait_s, job.statistics())
            reply = self._connection.ask(request)
            instruction = read_instruction(reply)
            if isinstance(instruction, ins.Leave):
                return
            if isinstance(instruction, ins.Wait):
                self._broadcast(Command("idle"))
                report = ins.Report()
            elif isinstance(instruction, ins.Summarise):
                report = job.summarise(instruction)
            else:
                report = self._execute(job, reply, service)

    def _execute(self, job: Any, reply: pb.NextReply, service: StateService | None) -> ins.Report:
        assert service is not None
        command = self._broadcast(service.command(reply))
        report = execute(job, command, loads_state=False)
        service.version = job.steps
        return report


def beat(connection: SlotConnection, job: Any, name: str) -> Heartbeat:
    """Return a heartbeat for the worker of this name, at the interval of its job."""
    busy = pb.NextRequest(worker=name, busy=True)
    return Heartbeat(lambda: connection.ask(busy), job.spec.heartbeat_s)


def leader_request(report: ins.Report, name: str, wait_s: float, statistics: Mapping[str, Any]) -> pb.NextRequest:
    """Return a report as the request of the worker of this name."""
    request = to_request(report)
    request.worker, request.wait_s, request.statistics_json = name, wait_s, json.dumps(statistics)
    return request


def broadcast_interval_s(environment: Mapping[str, str]) -> float:
    """Return the longest time between two broadcasts: below the time after which Horovod warns of stalled ranks."""
    text = environment.get("HOROVOD_STALL_CHECK_TIME_SECONDS", "")
    return min(WAIT_S, (float(text) if text.isdigit() and int(text) else 60.0) / 2)


class GroupLeader(Leader):
    """Rank 0 of a group.

    Args:
        communicator: The group.
        connection: Registration at the job server, as a worker.
        artifacts: Makes a job's artifacts readable.
        members: Numbers of the members among the job's workers, by rank.
        spans: Takes what this rank does.
    """

    role = "worker"

    def __init__(
        self,
        communicator: Communicator,
        connection: SlotConnection,
        artifacts: OpenArtifacts,
        members: Sequence[int],
        spans: SpanRing | None = None,
    ) -> None:
        super().__init__(communicator, connection, artifacts, spans)
        self._members = tuple(members)

    def _serve(self, assignment: pb.WorkerAssignment) -> None:
        job_id = assignment.job_id
        self._connection.begin(job_id)
        values = {"spec": assignment.spec_json, "artifacts": assignment.artifact_dir, "members": self._members}
        spec, number, stopped = parse_job(assignment.spec_json), self._members[0], self._connection.stopped
        way = functools.partial(connect, assignment, spec=spec, number=number, stopped=stopped)
        command = self._broadcast(Command("job", values))
        job = build_group_job(self._communicator, command, self._artifacts, way, self._spans)
        try:
            self._connection.send("worker", ready=pb.SlotReady(job_id=job_id))
            self._work(job, assignment.worker)
        finally:
            job.exchange.close()
        self._broadcast(Command("release"))
        self._connection.send("worker", finished=pb.SlotFinished(job_id=job_id))

    def _execute(self, job: Any, reply: pb.NextReply, service: StateService | None) -> ins.Report:
        return execute(job, self._broadcast(Command("do", {}, reply.SerializeToString())), loads_state=False)


logger = logging.getLogger(__name__)

LINGER_S = 10.0
BLAME_S = 3.0


def take_part(communicator: Communicator, options: argparse.Namespace) -> None:
    """Run as a rank until the end."""
    ring = str(options.ring).encode() if communicator.rank == 0 else None
    directory = Path(communicator.broadcast(ring).decode())
    if communicator.rank == 0:
        lead(communicator, options.server, directory, options.members)
    else:
        follow(communicator, directory, lingers=options.watch_stdin)


def lead(communicator: Communicator, server: str, directory: Path, members: Sequence[int] = ()) -> None:
    """Run as rank 0, of a ring or of the group with these members."""
    token = (directory / "token").read_text().strip()
    connection = SlotConnection(server, token, directory.name, roles_of(members))
    leader = make_leader(communicator, connection, partial(share, communicator), members)
    watch = FailureWatch(directory, connection)
    try:
        leader.run()
    except Exception as error:
        logger.exception("rank 0 failed")
        if is_broken_world(error):
            watch.reported.wait(BLAME_S)  # another rank has the reason; otherwise the launcher's log has it
        elif connection.job_id and not connection.stopped.is_set():
            leave_failure(directory, 0, error)
            connection.send("worker", failed=failure_of(connection.job_id, error, 0))
        connection.stopped.wait(BLAME_S)
        raise
    connection.close()


def roles_of(members: Sequence[int]) -> tuple[str, ...]:
    """Return the roles of the slots that rank 0 registers."""
    return (GroupLeader.role,) if members else ROLES


def make_leader(
    communicator: Communicator,
    connection: SlotConnection,
    artifacts: OpenArtifacts,
    members: Sequence[int],
    spans: SpanRing | None = None,
) -> Leader:
    """Return rank 0 of a ring, or of the group with these members; ``spans`` takes what it does."""
    if members:
        return GroupLeader(communicator, connection, artifacts, members, spans)
    return Leader(communicator, connection, artifacts, spans)


def follow(communicator: Communicator, directory: Path, *, lingers: bool) -> None:
    """Run as a rank other than 0.

    Args:
        communicator: All ranks.
        directory: Directory of the ring.
        lingers: Whether the end of this rank would end rank 0's script before it has read the failure.
    """
    try:
        Follower(communicator, partial(share, communicator)).run()
    except Exception as error:
        logger.exception("rank %d failed", communicator.rank)
        if not is_broken_world(error):
            leave_failure(directory, communicator.rank, error)
        if lingers:
            _await_removal(directory)
        raise


def _await_removal(directory: Path) -> None:
    """Wait until the server and its directory are gone, up to a deadline."""
    pause = threading.Event()
    for _ in range(round(LINGER_S / LOOK_S)):
        if not directory.exists() or pause.wait(LOOK_S):
            return
