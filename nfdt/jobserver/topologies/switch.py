"""How the flat workers of a job become groups between two of its epochs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import epochs_allow_groups, grouped, seen_by_coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import Site
from nfdt.jobserver.job_log import Journal
from nfdt.jobserver.job_slots import Crew
from nfdt.jobserver.topologies.groups import GroupCrew, WaitFor
from nfdt.planning import Groups


def may_form_groups(site: Site, spec: JobSpec) -> bool:
    """Whether a job that chooses its row can turn to groups: worlds start here, and its epochs stay what they were."""
    if not epochs_allow_groups(spec):
        return False
    return site.rings is not None and site.launches_workers and importlib.util.find_spec("horovod") is not None


class Turn:
    """From flat workers to groups: the worlds come up first, so that a job whose worlds do not come up stays as it is.

    Args:
        site: The server.
        job_id: The job.
        spec: The job with flat workers.
        crew: Its slots.
        journal: Where changes are told.

    Attributes:
        spec: The job with groups.
        groups: Them.
    """

    def __init__(self, site: Site, job_id: str, spec: JobSpec, crew: Crew, journal: Journal, groups: Groups) -> None:
        self.spec = grouped(spec)
        self.groups = GroupCrew(site, job_id, self.spec, crew, journal, planned=groups)
        self._crew, self._journal, self._flat = crew, journal, crew.living()

    def begin(self, wait_for: WaitFor, check: Callable[[], None]) -> bool:
        """Bring the worlds up; False: they do not come up, and all is as before.

        Args:
            wait_for: See :data:`~nfdt.jobserver.topologies.groups.WaitFor`.
            check: Raises where the job has to end.
        """
        before = self._crew.spec
        self._crew.spec = self.spec
        try:
            self.groups.form(wait_for)
        except JobFailed as error:
            self.groups.disband()
            self._crew.spec = before
            check()
            self._journal.tell("warning", f"The workers stay flat, because groups did not come up: {error}")
            return False
        return True

    def complete(self, coordinator: Coordinator) -> None:
        """The flat workers leave, and the coordinator goes on with the groups."""
        coordinator.retire_all()
        for seat in self._flat:
            self._crew.let_go(seat)
        seen = seen_by_coordinator(self.spec, len(self.groups.seats()))
        coordinator.renew(seen, self.groups.sizes)
