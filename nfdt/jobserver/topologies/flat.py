"""Independent workers in slots of the pool, which may form groups between two epochs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import ClassVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.online_planner import ShardLoad, plan_event
from nfdt.coordinator.topology_view import FLAT, TopologyView, grouped
from nfdt.core.errors import JobFailed
from nfdt.core.host.keras_backend import TENSORFLOW
from nfdt.core.jobs.admission import backend_of
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.placement import machine_of
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.groups import GroupsTopology
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery
from nfdt.jobserver.topologies.slot_supply import WorkerReplacement, launch_shards, launch_workers
from nfdt.planning.cost_model import PlanChoice


class FlatTopology(Topology):
    """Topology of the workers of any algorithm that needs no Horovod."""

    view: ClassVar[TopologyView] = FLAT
    restores = True

    def __init__(self, parts: JobParts, spec: JobSpec) -> None:
        super().__init__(parts, spec)
        wanted = self.view.slots_wanted(spec)
        least = spec.cluster.min_workers or wanted
        self._replacement = WorkerReplacement(parts, wanted, spec.start_timeout_s, least=least)
        self._may_form_groups = may_form_groups(parts, self.view, spec)

    @property
    def least_workers(self) -> int:
        """Number of workers with which the job may begin, and go on while another one waits for workers."""
        return self.spec.cluster.min_workers or super().least_workers

    def start(self, shards: int) -> None:
        """Make the server's launcher start missing slots."""
        launch_shards(self.parts.server, shards)
        launch_workers(self.parts.server, self.spec, self.spec.cluster.workers)

    def connect(self, coordinator: Coordinator) -> ShardClients:
        """Return a client that continues with restored shards."""
        self.recovery = ShardRecovery(self.parts, coordinator)
        return self.recovery.shards

    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Replace lost workers by free slots, once their shards are there."""
        if self.recovery is None or not self.recovery.running:
            self._replacement.replace_lost(coordinator, now)

    def lost(self, job_slot: JobSlot, how: str, *, killed: bool = False) -> bool:
        """Restore a lost shard."""
        if self.recovery is None or job_slot not in self.parts.slots.shards:
            return False
        self.recovery.lose(job_slot, how, killed=killed)
        return True

    def review(self, coordinator: Coordinator, shards: ShardClients, remaining_s: float) -> Topology:
        """Give up workers for a job that waits; change to groups if the planner expects a gain, tried once."""
        self.parts.mailbox.handle(lambda: self._give_up_workers(coordinator))
        if not self._may_form_groups:
            return self
        mailbox = self.parts.mailbox
        load = ShardLoad.of(mailbox.call(shards.statistics))
        choice = mailbox.handle(lambda: self._choose_groups(coordinator, load, remaining_s))
        if choice is None:
            return self
        if self.recovery is not None:
            self.recovery.roll_back("Groups are formed")
        return mailbox.handle(lambda: self._form_groups(coordinator, choice))

    def _give_up_workers(self, coordinator: Coordinator) -> None:
        living, demand = self.parts.slots.living(), self.parts.server.pool.demand
        spare = max(0, min(demand, len(living) - self.least_workers))
        for job_slot in living[len(living) - spare :]:
            coordinator.retire(job_slot.name)
            self.parts.slots.release(job_slot)
        if spare:
            text = f"{spare} workers go to a job that waits, {len(living) - spare} train on."
            self.parts.job_log.write("info", text)

    def _choose_groups(self, coordinator: Coordinator, load: ShardLoad, remaining_s: float) -> PlanChoice | None:
        machines = {slot.name: "/".join(machine_of(slot.slot.hello)) for slot in self.parts.slots.living()}
        return coordinator.plan_groups(load, remaining_s, machines)

    def _form_groups(self, coordinator: Coordinator, choice: PlanChoice) -> Topology:
        self._may_form_groups = False
        workers = workers_by_member(self.parts, self.spec)
        if len(workers) < self.spec.cluster.workers:
            return self  # lost workers leave gaps in the numbers
        groups = switch_to_groups(self.parts, self.spec, choice, workers, coordinator)
        if groups is not None:
            self.close()
        return groups or self

    def close(self) -> None:
        """End snapshots and restorations of the shards."""
        if self.recovery is not None:
            self.recovery.close()


def may_form_groups(parts: JobParts, view: TopologyView, spec: JobSpec) -> bool:
    """Whether a job's plan allows groups, and this server can make their rings."""
    if not view.may_form_groups(spec) or parts.rings is None or backend_of(spec.versions) != TENSORFLOW:
        return False
    server = parts.server
    if parts.rings.in_slots:
        return True
    return server.rings is not None and server.launches_workers and importlib.util.find_spec("horovod") is not None


def workers_by_member(parts: JobParts, spec: JobSpec) -> dict[int, JobSlot]:
    """Return the original flat workers by number; for a launcher, those on this machine."""
    slots, rings = parts.slots, parts.rings
    anywhere = rings is not None and rings.in_slots
    living = [s for s in slots.living() if anywhere or parts.server.is_here(s.slot.hello)]
    return {job_slot.index: job_slot for job_slot in living if job_slot.index < spec.cluster.workers}


def switch_to_groups(
    parts: JobParts, spec: JobSpec, choice: PlanChoice, workers: Mapping[int, JobSlot], coordinator: Coordinator
) -> GroupsTopology | None:
    """Replace flat workers by the groups that the planner chose; a message.

    Launched rings start first, so that a failure leaves the job unchanged.
    Rings in worker slots need those of the flat workers: after a failure, flat workers take them again.

    Args:
        parts: Parts of the job.
        spec: Specification of the job with flat workers.
        choice: The planner's choice.
        workers: The flat workers by number.
        coordinator: Coordinator of the job.

    Returns:
        Topology with which the job continues; None if the groups did not start and the workers stay flat.
    """
    slots, flat_spec, flat = parts.slots, parts.slots.spec, parts.slots.living()
    topology = GroupsTopology(parts, grouped(spec), choice.preset.groups)
    slots.spec = topology.spec  # that of the ranks which start now

    def retire() -> None:
        coordinator.retire_all()
        for job_slot in flat:
            slots.release(job_slot)

    in_slots = parts.rings is not None and parts.rings.in_slots
    if parts.rings is not None and in_slots:
        parts.rings.adopt({number: job_slot.slot.hello for number, job_slot in workers.items()})
        retire()
    try:
        topology.form()
    except JobFailed as error:
        topology.disband()
        slots.spec = flat_spec
        parts.mailbox.check()
        if in_slots:
            coordinator.expect(spec.cluster.workers)
        parts.job_log.write("warning", f"The workers stay flat, because groups did not come up: {error}")
        return None
    parts.job_log.record("plan", plan_event(choice))
    if not in_slots:
        retire()
    leaders = topology.leaders()
    slots.wanted = topology.view.slots_wanted(topology.spec)
    coordinator.renew(topology.view.effective_spec(topology.spec, groups=len(leaders)), topology.sizes)
    slots.admit(leaders, coordinator)
    return topology
