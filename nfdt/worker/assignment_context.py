"""Surroundings of an assignment: the connection of its slot, the job server, the end of the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.artifacts import ArtifactReader, default_cache
from nfdt.worker.movable_client import ShardMoves


@dataclass(frozen=True)
class AssignmentContext:
    """Surroundings of one assignment.

    Attributes:
        job_id: Identifier of the job.
        name: Name of the slot.
        address: ``HOST:PORT`` of the job server.
        stub: Stub of the Workers service.
        send: Sends a message of the slot to the server, as in ``send(ready=...)``.
        stopped: Event that is set when the assignment is over.
        ending: Event that is set when this process shall end after the current step.
        moves: Announcements of where the job's shards serve.
        host: Address of this machine at which others reach the slot.
        tls: ``ca_file``, ``cert_file``, ``key_file`` of :func:`nfdt.core.wire.channel.open_channel`.
        patience_s: Time limit for a server, or a shard, that does not answer, in seconds.
    """

    job_id: str
    name: str
    address: str
    stub: Any
    send: Callable[..., None]
    stopped: threading.Event
    ending: threading.Event
    moves: ShardMoves
    host: str
    tls: Mapping[str, Any]
    patience_s: float

    def send_output(self, lines: list[pb.OutputLine]) -> None:
        """Send lines that the job has printed to its log."""
        self.send(output=pb.SlotOutput(job_id=self.job_id, lines=lines))

    def open_artifacts(self, job_id: str, shared: str, spec: JobSpec) -> ArtifactReader:
        """Return the reader of a job's artifacts, which are in the folder ``shared`` or, if that is "", fetched."""
        whole_bytes = spec.cluster.fetch_whole_mb * 2**20
        return ArtifactReader(self.stub, job_id, shared, default_cache(), self.address, whole_bytes)
