"""Change of a job's flat workers to groups between two of its epochs."""

from __future__ import annotations

import importlib.util

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.online_planner import plan_event
from nfdt.coordinator.topology_view import TopologyView, grouped
from nfdt.core.errors import JobFailed
from nfdt.core.host.keras_backend import TENSORFLOW
from nfdt.core.jobs.admission import backend_of
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.topologies.group_slots import GroupSlots
from nfdt.jobserver.topologies.groups import GroupsTopology
from nfdt.planning import Groups, PlanChoice


def may_form_groups(parts: JobParts, view: TopologyView, spec: JobSpec) -> bool:
    """Whether a job's plan allows groups, and this server can make their rings."""
    if not view.may_form_groups(spec) or parts.rings is None or backend_of(spec.versions) != TENSORFLOW:
        return False
    server = parts.server
    if parts.rings.takes_slots:
        return True
    return server.rings is not None and server.launches_workers and importlib.util.find_spec("horovod") is not None


def workers_by_member(parts: JobParts, spec: JobSpec) -> dict[int, JobSlot]:
    """Return the original flat workers by number; for a launcher, those on this machine."""
    slots, rings = parts.slots, parts.rings
    anywhere = rings is not None and rings.takes_slots
    living = [s for s in slots.living() if anywhere or parts.server.is_here(s.slot.hello)]
    return {job_slot.index: job_slot for job_slot in living if job_slot.index < spec.cluster.workers}


def switch_to_groups(
    parts: JobParts, spec: JobSpec, choice: PlanChoice, coordinator: Coordinator
) -> GroupsTopology | None:
    """Replace flat workers by the groups that the planner chose; a message.

    Returns:
        Topology with which the job continues; None if the groups did not start and the workers stay flat.
    """
    switch = TopologySwitch(parts, spec, choice.preset.groups)
    if not switch.begin(coordinator):
        return None
    parts.job_log.record("plan", plan_event(choice))
    return switch.complete(coordinator)


class TopologySwitch:
    """Change from flat workers to groups.

    Launched rings start first, so that a failure leaves the job unchanged.
    Rings in worker slots need those of the flat workers: after a failure, flat workers take them again.

    Args:
        parts: Parts of the job.
        spec: Specification of the job with flat workers.
        groups: Groups to form.
    """

    def __init__(self, parts: JobParts, spec: JobSpec, groups: Groups) -> None:
        self._parts, self._spec, self._workers = parts, grouped(spec), workers_by_member(parts, spec)
        self._slots, self._flat = parts.slots, parts.slots.living()
        self._groups = GroupSlots(parts.rings, self._spec, parts.slots, parts.job_log, planned=groups)

    def begin(self, coordinator: Coordinator) -> bool:
        """Start the rings.

        Returns:
            Whether they started. If not, the job is unchanged, and the reason is in the job's log.
        """
        before = self._slots.spec
        self._slots.spec = self._spec
        if self._parts.rings is not None and self._parts.rings.takes_slots:
            self._parts.rings.adopt({i: job_slot.slot.hello for i, job_slot in self._workers.items()})
            self._retire(coordinator)
        try:
            self._groups.form(self._parts.wait_for)
        except JobFailed as error:
            self._groups.disband()
            self._slots.spec = before
            self._parts.mailbox.check()
            if not self._flat:
                coordinator.expect(self._spec.cluster.workers)
            self._parts.job_log.write("warning", f"The workers stay flat, because groups did not come up: {error}")
            return False
        return True

    def complete(self, coordinator: Coordinator) -> GroupsTopology:
        """Release the flat workers, and make the coordinator continue with the groups' leaders."""
        self._retire(coordinator)
        leaders = self._groups.leaders()
        topology = GroupsTopology(self._parts, self._spec, self._groups)
        self._slots.wanted = topology.view.slots_wanted(self._spec)
        coordinator.renew(topology.view.effective_spec(self._spec, groups=len(leaders)), self._groups.sizes)
        self._slots.admit(leaders, coordinator)
        return topology

    def _retire(self, coordinator: Coordinator) -> None:
        """Release the flat workers, once."""
        if self._flat:
            coordinator.retire_all()
        for job_slot in self._flat:
            self._slots.release(job_slot)
        self._flat = []
