"""A slot as a rank of an allreduce ring."""

from __future__ import annotations

from hfdt.runtime import slot_rank
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.artifacts import ArtifactReader
from nfdt.worker.assignment_context import AssignmentContext


def run_rank(assignment: pb.RankAssignment, context: AssignmentContext, token: str) -> None:
    """Run as a rank until the ring ends; ``token`` is that of the server."""
    job_id = assignment.job_id
    server = slot_rank.ServerAccess(context.address, token, context.tls, context.host, context.stub)

    def open_artifacts(spec: JobSpec, folder: str) -> ArtifactReader:
        return context.open_artifacts(job_id, assignment.artifact_dir, spec)

    def report(*, left: bool = False) -> None:
        context.send(ready=pb.SlotReady(job_id=job_id, left=left))

    slot_rank.run_rank(assignment, server, open_artifacts, report, context.spans, context.worlds)
