"""Parts of one job that its topology uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.launch.ring import RingMaker

WaitFor = Callable[[Callable[[], list[str]]], None]
"""Returns when a function names no missing part any more; raises when the job ends or it takes too long."""


@dataclass(frozen=True)
class TopologyContext:
    """Parts of one job that its topology uses.

    Attributes:
        server: The server.
        job_id: The job.
        slots: Slots of the job.
        job_log: Log of the job.
        fetchable: Names of the artifacts that the job's slots may fetch.
        rings: Maker of the job's rings; None: the server can make none.
        changed: Condition of the job, which guards ``slots`` and the coordinator.
        wait_for: See :data:`WaitFor`; called with ``changed`` held.
        check: Raises the reason why the job must end, if there is one; called with ``changed`` held.
        fail: Ends the job; called with ``changed`` held.
    """

    server: ServerContext
    job_id: str
    slots: JobSlots
    job_log: JobLog
    fetchable: set[str]
    rings: RingMaker | None
    changed: threading.Condition
    wait_for: WaitFor
    check: Callable[[], None]
    fail: Callable[[BaseException], None]
