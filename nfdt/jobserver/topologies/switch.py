"""How the flat workers of a job become groups between two of its epochs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import epochs_allow_groups, grouped, seen_by_coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.topologies.group_slots import GroupSlots, WaitFor
from nfdt.planning import Groups


def may_form_groups(server: ServerContext, spec: JobSpec) -> bool:
    """Whether a job that chooses its row can turn to groups: worlds start here, and its epochs stay what they were."""
    if not epochs_allow_groups(spec):
        return False
    return server.rings is not None and server.launches_workers and importlib.util.find_spec("horovod") is not None


class TopologySwitch:
    """From flat workers to groups: the worlds come up first, so that a job whose worlds do not come up stays as it is.

    Args:
        server: The server.
        job_id: The job.
        spec: The job with flat workers.
        slots: Its slots.
        job_log: Where changes are told.

    Attributes:
        spec: The job with groups.
        groups: Them.
    """

    def __init__(
        self, server: ServerContext, job_id: str, spec: JobSpec, slots: JobSlots, job_log: JobLog, groups: Groups
    ) -> None:
        self.spec = grouped(spec)
        self.groups = GroupSlots(server, job_id, self.spec, slots, job_log, planned=groups)
        self._slots, self._job_log, self._flat = slots, job_log, slots.living()

    def begin(self, wait_for: WaitFor, check: Callable[[], None]) -> bool:
        """Bring the worlds up; False: they do not come up, and all is as before.

        Args:
            wait_for: See :data:`~nfdt.jobserver.topologies.group_slots.WaitFor`.
            check: Raises where the job has to end.
        """
        before = self._slots.spec
        self._slots.spec = self.spec
        try:
            self.groups.form(wait_for)
        except JobFailed as error:
            self.groups.disband()
            self._slots.spec = before
            check()
            self._job_log.tell("warning", f"The workers stay flat, because groups did not come up: {error}")
            return False
        return True

    def complete(self, coordinator: Coordinator) -> None:
        """The flat workers leave, and the coordinator goes on with the groups."""
        coordinator.retire_all()
        for job_slot in self._flat:
            self._slots.let_go(job_slot)
        seen = seen_by_coordinator(self.spec, len(self.groups.job_slots()))
        coordinator.renew(seen, self.groups.sizes)
