"""Change of a job's flat workers to groups between two of its epochs."""

from __future__ import annotations

import importlib.util

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.online_planner import plan_event
from nfdt.coordinator.topology_view import TopologyView, grouped
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.topologies.base import TopologyContext
from nfdt.jobserver.topologies.group_slots import GroupSlots
from nfdt.jobserver.topologies.groups import GroupsTopology
from nfdt.planning import Groups, PlanChoice


def may_form_groups(server: ServerContext, view: TopologyView, spec: JobSpec) -> bool:
    """Whether a job's plan allows groups, and this server can launch their rings."""
    if not view.may_form_groups(spec):
        return False
    return server.rings is not None and server.launches_workers and importlib.util.find_spec("horovod") is not None


def switch_to_groups(
    context: TopologyContext, spec: JobSpec, choice: PlanChoice, coordinator: Coordinator
) -> GroupsTopology | None:
    """Replace flat workers by the groups that the planner chose; ``context.changed`` is held.

    Returns:
        Topology with which the job continues; None if the groups did not start and the workers stay flat.
    """
    switch = TopologySwitch(context, spec, choice.preset.groups)
    if not switch.begin():
        return None
    context.job_log.record("plan", plan_event(choice))
    return switch.complete(coordinator)


class TopologySwitch:
    """Change from flat workers to groups: the rings start first, so that a failure leaves the job unchanged.

    Args:
        context: Parts of the job.
        spec: Specification of the job with flat workers.
        groups: Groups to form.
    """

    def __init__(self, context: TopologyContext, spec: JobSpec, groups: Groups) -> None:
        self._context, self._spec = context, grouped(spec)
        self._slots, self._flat = context.slots, context.slots.living()
        self._groups = GroupSlots(
            context.server, context.job_id, self._spec, context.slots, context.job_log, planned=groups
        )

    def begin(self) -> bool:
        """Start the rings.

        Returns:
            Whether they started. If not, the job is unchanged, and the reason is in the job's log.
        """
        before = self._slots.spec
        self._slots.spec = self._spec
        try:
            self._groups.form(self._context.wait_for)
        except JobFailed as error:
            self._groups.disband()
            self._slots.spec = before
            self._context.check()
            self._context.job_log.write("warning", f"The workers stay flat, because groups did not come up: {error}")
            return False
        return True

    def complete(self, coordinator: Coordinator) -> GroupsTopology:
        """Release the flat workers, and make the coordinator continue with the groups' leaders."""
        coordinator.retire_all()
        for job_slot in self._flat:
            self._slots.release(job_slot)
        leaders = self._groups.leaders()
        topology = GroupsTopology(self._context, self._spec, self._groups)
        self._slots.wanted = topology.view.slots_wanted(self._spec)
        coordinator.renew(topology.view.effective_spec(self._spec, groups=len(leaders)), self._groups.sizes)
        self._slots.admit(leaders, coordinator)
        return topology
