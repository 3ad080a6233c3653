"""Supply of slots to a job: starting them, failing without them, and replacing lost ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.jobs.admission import backend_of, check_versions
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_parts import JobParts

ALONE_S = 20.0  # time without workers after which a job fails that no worker can join


@dataclass(frozen=True)
class SlotNeed:
    """Numbers of slots of one role: wanted, registered (``attending``), free."""

    role: str
    wanted: int
    attending: int
    free: int

    @property
    def met(self) -> bool:
        """Whether enough slots are free."""
        return self.free >= self.wanted


def launch_shards(server: ServerContext, shards: int) -> None:
    """Make the launcher keep free shard slots on this machine, as many as other machines lack for ``shards``."""
    if server.launcher is not None:
        _, elsewhere = server.pool.attending("shard", lambda slot: server.offers_shard(slot.hello))
        here, free = server.pool.attending("shard", lambda slot: server.is_here(slot.hello))
        server.launcher.ensure("shard", here - free + max(0, shards - elsewhere))


def launch_workers(server: ServerContext, spec: JobSpec, wanted: int) -> None:
    """Make the launcher keep ``wanted`` worker slots on the job's backend, if it starts any."""
    if server.launcher is not None and server.launches_workers:
        most, backend = server.most_workers, backend_of(spec.versions)
        server.launcher.ensure("worker", wanted if most is None else min(wanted, most), backend)
        server.pool.evict("worker", lambda slot: server.is_launched(slot) and backend_of(slot.versions) != backend)


def check_supply(parts: JobParts, short: Sequence[SlotNeed], *, late: bool, all_at_once: bool) -> None:
    """Raise JobFailed if no more slots can be expected; see :meth:`Topology.give_up`.

    ``all_at_once``: the job cannot begin with fewer slots than it wants.
    """
    server, spec = parts.server, parts.slots.spec
    launcher = server.launcher
    for need in short:
        launched = need.role == "shard" or server.launches_workers
        if launcher is not None and launched and launcher.failure:
            raise JobFailed(f"No {need.role} slots: {launcher.failure}")
        if late and (need.attending == 0 or (all_at_once and need.role == "worker")):
            unfit = ""
            if need.role == "worker":
                check_versions(spec, server.pool.slot_counts().versions)
                unfit = parts.slots.unfit
            raise JobFailed(
                f"{need.attending or 'No'} {need.role} slot{'s' if need.attending > 1 else ''} attend"
                f"{'' if need.attending > 1 else 's'} this server after {spec.start_timeout_s:g} s{unfit}; "
                f"the job wants {need.wanted}. Add some with `nfdt worker --server HOST:PORT --slots N`."
            )


class WorkerReplacement:
    """Replacement of lost or missing workers by free slots.

    Args:
        parts: Parts of the job.
        wanted: Number of workers.
        patience_s: Time without workers after which the job fails though others may still register.
        least: Number of workers while another job waits for workers; default: ``wanted``.
    """

    def __init__(self, parts: JobParts, wanted: int, patience_s: float = ALONE_S, *, least: int | None = None) -> None:
        self._server, self._slots, self._job_log = parts.server, parts.slots, parts.job_log
        self._wanted, self._patience_s = wanted, patience_s
        self._least = wanted if least is None else least
        self._alone_since: float | None = None
        self._reported_launch_failure = False

    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Admit free slots; fail the job when it has been without workers for too long."""
        missing = (self._least if self._server.pool.demand else self._wanted) - len(self._slots.living())
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
