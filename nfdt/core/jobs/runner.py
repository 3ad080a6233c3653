"""Interface between the Jobs service and the part of the server that runs the jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from nfdt.core.jobs.feed import BatchFeed
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest

Role = Literal["worker", "shard"]


@dataclass(frozen=True)
class SlotCounts:
    """Number of connected worker slots, number of those without a job, and the versions that they run."""

    attending: int
    free: int
    versions: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class JobMeasures:
    """Numbers of a running job that are not stored.

    Attributes:
        waiting_tasks: Number of tasks of the epoch that no worker has yet.
        shards: Statistics of each shard at the end of the last epoch, see
            :meth:`nfdt.shard.statistics.ShardStatistics.to_json`.
    """

    waiting_tasks: int
    shards: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class QueuePlace:
    """Place of a waiting job in the queue, from 1 on, and in how many seconds it probably starts; None: unknown."""

    number: int = 0
    starts_in_s: float | None = None


class JobRunner(Protocol):
    """Runs submitted jobs; every method returns quickly and may be called from any thread."""

    def admit(self, spec: JobSpec, manifest: Manifest) -> None:
        """Check a job before it is accepted.

        Raises:
            UsageError: the job cannot run, whatever slots there are.
        """

    def submitted(self, job_id: str) -> None:
        """Schedule a new job, which is queued in the store."""

    def control(self, request: pb.ControlRequest) -> None:
        """Forward an action to a job; a job that has ended ignores it.

        Raises:
            UsageError: there is no such job, or the action is not possible at this moment.
        """

    def snapshot(self, job_id: str, contents: pb.SnapshotRequest.Contents.ValueType) -> pb.SnapshotReply:
        """Return the current state of a job, with these contents at least, or the last one that it left."""

    def feed(self, job_id: str) -> BatchFeed:
        """Return the feed of a job, for batches of its client."""

    def watching(self, job_id: str, change: int, session: str = "") -> None:
        """Change the number of clients that watch the job by ``change`` (1 or -1).

        A client with a session runs the callbacks of the job, which waits for it from then on.

        Raises:
            JobTaken: the client of another session watches the job.
        """

    def check_free(self, job_id: str, session: str) -> None:
        """Raise JobTaken if the client of another session watches the job."""

    def slot_counts(self) -> SlotCounts:
        """Return the counts of the connected worker slots."""

    def slots(self, role: Role | None = None) -> list[pb.SlotDescription]:
        """Return new descriptions of all connected slots, or of those of a role."""

    def stacks(self, job_id: str, host: str, pid: int) -> str:
        """Return where the threads of a process of a job are, as text.

        Raises:
            UsageError: the job has no such process in a slot.
            ServerUnreachable: the process does not answer.
        """

    def places(self) -> dict[str, QueuePlace]:
        """Return the place of each waiting job in the queue."""

    def workers_wanted(self) -> int:
        """Return the number of workers of the jobs that run, and of those that wait for nothing but slots."""

    def measures(self) -> dict[str, JobMeasures]:
        """Return the numbers of each job that trains now."""

    def artifacts_in_use(self) -> set[str]:
        """Return the artifacts that must stay on disk."""
