"""A slot as a parameter shard of a job."""

from __future__ import annotations

import logging

from nfdt.core.arrays.safetensors_io import load_arrays
from nfdt.core.host.signals import wait_in_main_thread
from nfdt.core.host.startup import note_start
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.model.program.code import load_code
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import load_state
from nfdt.shard.building import KeptEngine
from nfdt.shard.servicer import start_shard
from nfdt.worker.assignment_context import AssignmentContext

logger = logging.getLogger(__name__)


def run_shard(assignment: pb.ShardAssignment, context: AssignmentContext, kept: KeptEngine | None = None) -> KeptEngine:
    """Serve a shard until the job is over for it, or another assignment supersedes this one.

    Args:
        assignment: The assignment.
        context: Its context.
        kept: Result for the last job of this process.

    Returns:
        Engine for the next job.
    """
    kept = kept or KeptEngine()
    spec = parse_job(assignment.spec_json)
    reader = context.open_artifacts(assignment.job_id, assignment.artifact_dir, spec)
    manifest = Manifest.from_bytes(reader.read(spec.program))
    shard = start_shard(
        manifest,
        load_state(reader.path(assignment.state or manifest.state)),
        spec.algorithm,
        assignment.index,
        assignment.shards,
        workers=spec.cluster.workers,
        records=load_arrays(reader.path(assignment.records)) if assignment.records else None,
        token=assignment.job_token,
        custom_objects=load_code(manifest, reader.read, allow_code=spec.code),
        host=context.host,
        cert=assignment.tls_cert or None,
        key=assignment.tls_key or None,
        kept=kept,
        spans=context.spans,
        stored=lambda artifact: load_state(reader.path(artifact)),
        insecure=context.insecure,
    )
    try:
        note_start(context.name, "shard serves")
        logger.info("%s: shard %d serves at %s", context.name, assignment.index, shard.address)
        if not context.stopped.is_set():
            context.send(
                ready=pb.SlotReady(job_id=assignment.job_id, address=shard.address, incarnation=assignment.incarnation)
            )
        wait_in_main_thread(context.stopped)
    finally:
        ended = shard.stop()
    return kept if ended else KeptEngine()  # a push that still runs would train the next job
