"""Choice of what makes the rings of a job: worker slots, or a launcher on the server's machine."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.slot_notes import SlotNotes
from nfdt.jobserver.slot_rings import SlotRings
from nfdt.launch.horovod import LaunchedRings
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.ring import RingMaker


def takes_slots(server: ServerContext, spec: JobSpec) -> bool:
    """Whether the ranks of a job are worker slots of the pool.

    With the launcher ``auto`` they are, on a shared server; ranks that join and leave need ``horovodrun``.
    """
    shape = RingShape.of(spec.cluster)
    return shape.in_slots or (shape.launcher == "auto" and server.ranks_from_slots and not shape.elastic.elastic)


def make_rings(
    server: ServerContext,
    job_id: str,
    spec: JobSpec,
    slots: JobSlots,
    job_log: JobLog,
    notes: SlotNotes,
    fail: Callable[[BaseException], None],
) -> RingMaker | None:
    """Return the maker of a job's rings; None if this server can make none."""
    if takes_slots(server, spec):
        return SlotRings(server, job_id, slots, job_log, notes, spec.cluster.workers, fail)
    return None if server.rings is None else LaunchedRings(server.rings, job_id)
