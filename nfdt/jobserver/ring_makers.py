"""Choice of what makes the rings of a job, worker slots or a launcher, and which jobs may have rings here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from nfdt.core.errors import PolicyRefused, UsageError
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.slot_rings import SlotRings
from nfdt.launch.horovod import LaunchedRings
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.ring import RingMaker


def takes_slots(server: ServerContext, spec: JobSpec) -> bool:
    """Whether the ranks of a job are worker slots of the pool.

    With the launcher ``auto`` they are, on a shared server; ranks that join and leave need ``horovodrun``.
    """
    shape = RingShape.of(spec.cluster)
    return shape.in_slots or (shape.launcher == "auto" and not server.embedded and not shape.elastic.elastic)


def make_rings(slots: JobSlots, job_log: JobLog, fail: Callable[[BaseException], None]) -> RingMaker | None:
    """Return the maker of a job's rings; None if this server can make none."""
    if takes_slots(slots.server, slots.spec):
        return SlotRings(slots, job_log, fail)
    return None if slots.server.rings is None else LaunchedRings(slots.server.rings, slots.job_id)


def admit_rings(server: ServerContext, spec: JobSpec) -> None:
    """Refuse a job whose ranks cannot or may not be launched here.

    Raises:
        UsageError: The server launches no rings, Horovod is not installed, or the launcher is missing.
        PolicyRefused: See :func:`refuse_reach`.
    """
    shape, from_slots = RingShape.of(spec.cluster), takes_slots(server, spec)
    if from_slots and not server.embedded:
        refuse_reach(shape)
    if from_slots:
        return
    if server.rings is None:
        raise UsageError("This server starts no Horovod rings: it was started without slots of its own.")
    if importlib.util.find_spec("horovod") is None:
        raise UsageError(
            f"algorithm={spec.algorithm.name!r}: expected Horovod on the server's machine. Received: none. "
            "Run scripts/install-horovod there."
        )
    shape = RingShape.of(spec.cluster)
    if not server.embedded:
        refuse_reach(shape)
    server.rings.check(shape)


def refuse_reach(shape: RingShape) -> None:
    """Refuse jobs for which a shared server would log in elsewhere, or read, run or write a file that the job names.

    Raises:
        PolicyRefused: The job requests that.
    """
    if shape.hosts or shape.hostfile or shape.elastic.network_interfaces or shape.launcher == "world":
        raise PolicyRefused(
            "A shared server logs in nowhere on a job's behalf. Expected: a job without hosts, hostfile, "
            "network_interfaces or launcher='world'. Run the script without server=, or start it with mpirun."
        )
    if shape.files:
        raise PolicyRefused(
            "A shared server reads, runs and writes no file that a job names. Expected: a job without "
            "host_discovery_script, timeline or autotune_log. Received: "
            f"{', '.join(shape.files)}. Run the script without server=."
        )
