"""A slot as a worker of a job."""

from __future__ import annotations

import contextlib
import logging
import socket

from nfdt.core.host.startup import note_start
from nfdt.core.sharding import sparse_tables, tables_on_shards
from nfdt.core.specs.job import JobSpec, parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.patience import Patience
from nfdt.core.work.slot_connection import NextCalls
from nfdt.model.backends.contract import current
from nfdt.model.backends.mesh import choose_devices
from nfdt.model.program.manifest import Manifest
from nfdt.model.training.steps import BuiltProgram
from nfdt.transport.stream import StreamClient, shard_connector
from nfdt.worker.assignment_context import AssignmentContext
from nfdt.worker.movable_client import MovableClient
from nfdt.worker.worker import Worker

logger = logging.getLogger(__name__)


def run_worker(
    assignment: pb.WorkerAssignment, context: AssignmentContext, built: BuiltProgram | None = None
) -> BuiltProgram | None:
    """Run as a worker until the job is over for it.

    Args:
        assignment: The assignment.
        context: Its context.
        built: Result for the last job of this process.

    Returns:
        Program that the next job may use again; None if it must not.
    """
    if assignment.threads:
        current().limit_threads(assignment.threads)
    spec = parse_job(assignment.spec_json)
    reader = context.open_artifacts(assignment.job_id, assignment.artifact_dir, spec)
    manifest = Manifest.from_bytes(reader.read(spec.program))
    devices = _devices_for(spec, assignment.index, manifest, context.name)
    current().seed_worker(assignment.index)
    tables = sparse_tables(manifest, spec.algorithm, len(assignment.shards))
    looked_up = tables_on_shards(manifest, spec.algorithm, len(assignment.shards))
    job = (assignment.job_id, assignment.job_token)
    calls = NextCalls(context.stub, job, context.address, context.patience_s, context.stopped)
    connect_to = shard_connector(
        spec,
        manifest.layout,
        assignment.worker,
        assignment.index,
        context.stopped,
        overlap=spec.algorithm.overlap,
        tables=tables,
        looked_up=looked_up,
    )

    def make_patience() -> Patience:
        return Patience(context.patience_s, context.stopped)

    def connect(shards: ins.MoveShards) -> StreamClient:
        tls = {"ca_file": shards.shard_ca or None, "insecure": context.insecure}
        return connect_to(shards.shards, token=shards.shard_token, patience=make_patience(), **tls)

    shards, authority = tuple(assignment.shards), assignment.shard_ca
    context.moves.announce(
        ins.MoveShards(assignment.job_id, assignment.incarnation, shards, assignment.shard_token, authority)
    )
    client = MovableClient(context.moves, connect, make_patience)
    with contextlib.closing(client), current().distributed(devices, manifest.mesh):
        worker = Worker(
            spec,
            assignment.worker,
            assignment.index,
            manifest,
            read=reader.read,
            open_array=reader.open_array,
            open_rows=reader.open_rows,
            client=client,
            ask=calls.ask,
            take_rows=calls.take_rows,
            stopped=context.stopped,
            ending=context.ending,
            tables=tables,
            read_ranges=reader.read_ranges if looked_up else None,
            spans=context.spans,
            devices=devices,
            built=built,
        )
        context.send(ready=pb.SlotReady(job_id=assignment.job_id))
        note_start(context.name, "has built the model")
        worker.run()
        logger.info("%s: fetched %d bytes for job %s", context.name, reader.fetched_bytes, assignment.job_id)
        return worker.built


def _devices_for(spec: JobSpec, number: int, manifest: Manifest, slot: str) -> tuple[str, ...]:
    """Return the devices on which a worker of the job computes; it is the first that uses devices of this process.

    Raises:
        UsageError: this process has too few.
    """
    cluster, backend = spec.cluster, current()
    emulated = cluster.emulate.devices_of(number)
    if emulated is not None:
        backend.emulate_devices(emulated)
    owner = f"{slot} on {socket.gethostname()}"
    devices = choose_devices(
        backend.devices(), cluster.devices_per_worker, manifest.mesh, emulated=emulated, owner=owner
    )
    logger.info("%s computes on %s", slot, ", ".join(devices))
    return devices
