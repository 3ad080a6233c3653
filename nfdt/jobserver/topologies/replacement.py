"""Replacement of lost workers by free slots."""

from __future__ import annotations

from nfdt.coordinator.coordinator import Coordinator
from nfdt.jobserver.job_parts import JobParts

ALONE_S = 20.0  # time without workers after which a job fails that no worker can join


class WorkerReplacement:
    """Replacement of lost or missing workers by free slots.

    Args:
        parts: Parts of the job.
        wanted: Number of workers.
        patience_s: Time without workers after which the job fails though others may still register.
    """

    def __init__(self, parts: JobParts, wanted: int, patience_s: float = ALONE_S) -> None:
        self._server, self._slots, self._job_log = parts.server, parts.slots, parts.job_log
        self._wanted, self._patience_s = wanted, patience_s
        self._alone_since: float | None = None
        self._reported_launch_failure = False

    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Admit free slots; fail the job when it has been without workers for too long."""
        missing = self._wanted - len(self._slots.living())
        launch_failure = ""
        if missing > 0:
            self._slots.admit(self._slots.acquire_workers(missing), coordinator)
            launch_failure = self._report_launch_failure()
        if self._slots.living():
            self._alone_since = None
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        attending, _ = self._server.pool.attending("worker", self._slots.accepts)
        limit_s = ALONE_S if launch_failure or not self._slots.may_join else self._patience_s
        if now - self._alone_since > limit_s and not (attending and self._slots.may_join):
            why = "no worker slot attends the server any more" if not attending else "as many as may have taken over"
            last = f" The last: {self._slots.last_death}." if self._slots.last_death else ""
            failed = f" {launch_failure}." if launch_failure else ""
            coordinator.fail(f"All workers are gone, and {why}.{failed}{last}")

    def _report_launch_failure(self) -> str:
        """Return the reason why this machine starts no worker slots, logged once; "" if it starts them."""
        launcher = self._server.launcher
        failure = launcher.failure if launcher is not None and self._server.launches_workers else None
        if failure and not self._reported_launch_failure:
            self._job_log.write("warning", f"Workers that are gone are not replaced. {failure}.")
        self._reported_launch_failure = failure is not None
        return failure or ""
