"""Last state of a job, made from the exception that ended it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.errors import JobCancelled, JobFailed, NfdtError, ServerUnreachable, WorkerFailed
from nfdt.core.jobs.job_record import JobState
from nfdt.core.wire import workers_pb2 as pb
from nfdt.launch.ring import Ring

MAX_TEXT = 100_000


class PartLost(JobFailed):
    """Loss of a part that cannot be replaced while the job runs: the job can go on from its last stored state."""


class SlotError(WorkerFailed):
    """Exception of code in a slot; ``error`` holds the data with which a client can raise it again.

    Args:
        worker: Name of the shard or worker.
        failed: Description of the exception.
        members: Workers of the group that the slot leads: a rank is named by its number among them.
    """

    def __init__(self, worker: str, failed: pb.SlotFailed, members: Sequence[int] = ()) -> None:
        who = failed.failed_in or worker
        rank = who.removeprefix("rank-")
        if rank.isdigit() and int(rank) < len(members):
            who = f"member-{members[int(rank)]}"
        super().__init__(f"{who} failed: {failed.exception_type}: {failed.message[:1000]}")
        self.error = {
            "worker": who,
            "exception_module": failed.exception_module,
            "exception_type": failed.exception_type,
            "message": failed.message[:MAX_TEXT],
            "traceback": failed.traceback[-MAX_TEXT:],
        }

    @property
    def lost_connection(self) -> bool:
        """Whether the cause is another process that did not answer, whose end is the better explanation."""
        return self.error["exception_type"] in ("ServerUnreachable", "_MultiThreadedRendezvous", "_InactiveRpcError")


@dataclass(frozen=True)
class JobOutcome:
    """Last state of a job."""

    state: JobState
    reason: str | None = None
    error: dict[str, Any] | None = None


def outcome_of(error: BaseException) -> JobOutcome:
    """Return the outcome of a job that this exception ended."""
    match error:
        case JobCancelled():
            return JobOutcome("cancelled", str(error))
        case SlotError():
            return JobOutcome("failed", str(error), error.error)
        case JobFailed():
            return JobOutcome("failed", str(error))
        case NfdtError():
            return JobOutcome("failed", str(error), _described(error))
        case _:
            return JobOutcome("failed", f"The server failed: {type(error).__name__}: {error}", _described(error))


def explained(ring: Ring, error: BaseException) -> BaseException:
    """Return a better reason for the end of a job whose ring may have lost a rank."""
    if isinstance(error, (SlotError, JobCancelled)) or not isinstance(error, (JobFailed, ServerUnreachable)):
        return error
    ended = ring.why()
    if report := ring.report():
        return SlotError("the ring", pb.SlotFailed(**report), ring.shape.members)
    return ended or error


def _described(error: BaseException) -> dict[str, Any]:
    return {
        "worker": "server",
        "exception_module": type(error).__module__,
        "exception_type": type(error).__qualname__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error))[-MAX_TEXT:],
    }
