"""What a slot gives to the code that executes an assignment: its connection, the job server, the end of the job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.status import translated
from nfdt.core.work.artifacts import ArtifactReader, default_cache
from nfdt.core.work.rank_worlds import RankWorlds
from nfdt.core.work.spans import SpanRing
from nfdt.worker.movable_client import ShardMoves

CLOCK_S = 5.0  # limit of the call for the server's time


@dataclass(frozen=True)
class AssignmentContext:
    """What the code that executes one assignment needs of its slot.

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
        tls: ``ca_file``, ``cert_file``, ``key_file``, ``insecure`` of :func:`nfdt.core.wire.channel.open_channel`.
        patience_s: Time limit for a server, or a shard, that does not answer, in seconds.
        spans: What this process does for the job.
        worlds: Worlds of a rank.
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
    spans: SpanRing = field(default_factory=SpanRing)
    worlds: RankWorlds = field(default_factory=RankWorlds)

    @property
    def insecure(self) -> bool:
        """Whether shards may be reached in plain text: the job server is, on loopback or because somebody insisted."""
        return not self.tls.get("ca_file")

    def send_spans(self, spans: pb.SlotSpans) -> None:
        """Send what this process did to the trace of the job."""
        spans.job_id = self.job_id
        self.send(spans=spans)

    def read_clock(self) -> float:
        """Return the server's Unix time.

        Raises:
            NfdtError: the server does not answer.
        """
        with translated(self.address):
            return float(self.stub.ReadClock(pb.ClockRequest(), timeout=CLOCK_S).at)

    def send_output(self, lines: list[pb.OutputLine]) -> None:
        """Send lines that the job has printed to its log."""
        self.send(output=pb.SlotOutput(job_id=self.job_id, lines=lines))

    def open_artifacts(self, job_id: str, shared: str, spec: JobSpec) -> ArtifactReader:
        """Return the reader of a job's artifacts, which are in the folder ``shared`` or, if that is "", fetched."""
        whole_bytes = spec.cluster.fetch_whole_mb * 2**20
        return ArtifactReader(self.stub, job_id, shared, default_cache(), self.address, whole_bytes)
