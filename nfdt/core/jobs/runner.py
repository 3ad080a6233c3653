"""Interface between the Jobs service and the part of the server that runs the jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from nfdt.core.jobs.feed import FeedQueue
from nfdt.core.program.manifest import Manifest
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import jobs_pb2 as pb


@dataclass(frozen=True)
class SlotCounts:
    """The worker slots that attend: how many, how many without a job, and the versions they run."""

    attending: int
    free: int
    versions: tuple[Mapping[str, str], ...]


class JobRunner(Protocol):
    """Runs submitted jobs; every method returns soon and may be called from any thread."""

    def admit(self, spec: JobSpec, manifest: Manifest) -> None:
        """Look at a job before it is taken.

        Raises:
            UsageError: it cannot run, whatever slots there are.
        """
        ...

    def submitted(self, job_id: str) -> None:
        """A job is in the store, queued."""
        ...

    def control(self, request: pb.ControlRequest) -> None:
        """Pass an action on to a job; one that has ended takes no notice.

        Raises:
            UsageError: no such job, or not at this moment.
        """
        ...

    def snapshot(self, job_id: str) -> str:
        """The artifact of the state of a job that stands at an epoch's end or has ended."""
        ...

    def feed(self, job_id: str) -> FeedQueue:
        """Where the client's batches for a job go."""
        ...

    def watching(self, job_id: str, change: int) -> None:
        """One more (1) or one less (-1) client watches the job."""
        ...

    def slot_counts(self) -> SlotCounts:
        """The worker slots that attend."""
        ...
