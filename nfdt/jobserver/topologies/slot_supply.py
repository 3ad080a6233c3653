"""Slots that the server's own launcher starts for a job, and the errors if they do not register."""

from __future__ import annotations

from collections.abc import Sequence

from nfdt.core.errors import JobFailed
from nfdt.core.jobs.admission import backend_of, check_versions
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.need import SlotNeed


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


def check_supply(
    server: ServerContext, spec: JobSpec, short: Sequence[SlotNeed], *, late: bool, all_at_once: bool = False
) -> None:
    """Raise JobFailed if no more slots can be expected; see :meth:`Topology.give_up`.

    ``all_at_once``: the job cannot begin with fewer slots than it wants.
    """
    launcher = server.launcher
    for need in short:
        launched = need.role == "shard" or server.launches_workers
        if launcher is not None and launched and launcher.failure:
            raise JobFailed(f"No {need.role} slots: {launcher.failure}")
        if late and (need.attending == 0 or (all_at_once and need.role == "worker")):
            if need.role == "worker":
                check_versions(spec, server.pool.slot_counts().versions)
            raise JobFailed(
                f"{need.attending or 'No'} {need.role} slot{'s' if need.attending > 1 else ''} attend"
                f"{'' if need.attending > 1 else 's'} this server after {spec.start_timeout_s:g} s; "
                f"the job wants {need.wanted}. Add some with `nfdt worker --server HOST:PORT --slots N`."
            )
