"""Rank 0 of a group: communicates with the job server, the shards and the group."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.commands import Command
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.execution import build_group_job, execute
from hfdt.runtime.leader import Leader
from hfdt.runtime.outer import connect
from hfdt.runtime.slot_connection import SlotConnection
from hfdt.runtime.state_service import StateService
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.spans import SpanRing


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
