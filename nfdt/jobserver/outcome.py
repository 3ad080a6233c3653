"""How a job ends: the last state event, from whatever ended it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.errors import JobCancelled, JobFailed, NfdtError, ServerUnreachable, WorkerFailed
from nfdt.core.jobs.lifecycle import State
from nfdt.core.wire import workers_pb2 as pb
from nfdt.launch.horovod import Ring

MAX_TEXT = 100_000


class SlotError(WorkerFailed):
    """A slot's code raised; ``error`` is what a client needs to raise it again.

    Args:
        job_slot: Whose slot it is.
        failed: What was raised.
        members: Of the group that the slot leads: a rank is named by its number among the job's workers.
    """

    def __init__(self, job_slot: str, failed: pb.SlotFailed, members: Sequence[int] = ()) -> None:
        who = failed.failed_in or job_slot
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
        """Whether it failed because another process did not answer: that one's end is the better reason."""
        return self.error["exception_type"] in ("ServerUnreachable", "_MultiThreadedRendezvous", "_InactiveRpcError")


@dataclass(frozen=True)
class JobOutcome:
    """The last state of a job."""

    state: State
    reason: str | None = None
    error: dict[str, Any] | None = None


def outcome_of(error: BaseException) -> JobOutcome:
    """What a job that ended with this exception tells its client."""
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
    """A better reason for the end of a job whose ring may have lost a rank."""
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
