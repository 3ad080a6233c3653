"""Independent workers in slots of the pool, which may form groups between two epochs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.online_planner import ShardLoad
from nfdt.coordinator.topology_view import FLAT, TopologyView
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.need import SlotNeed
from nfdt.jobserver.placement import machine_of
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.replacement import WorkerReplacement
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery
from nfdt.jobserver.topologies.slot_supply import check_supply, launch_shards, launch_workers
from nfdt.jobserver.topologies.switch import may_form_groups, switch_to_groups, workers_by_member


class FlatTopology(Topology):
    """Topology of the workers of any algorithm that needs no Horovod."""

    view: ClassVar[TopologyView] = FLAT
    restores = True

    def __init__(self, parts: JobParts, spec: JobSpec) -> None:
        super().__init__(parts, spec)
        self._replacement = WorkerReplacement(parts, self.view.slots_wanted(spec), spec.start_timeout_s)
        self._may_form_groups = may_form_groups(parts, self.view, spec)

    def start(self, shards: int) -> None:
        """Make the server's launcher start missing slots."""
        launch_shards(self.parts.server, shards)
        launch_workers(self.parts.server, self.spec, self.spec.cluster.workers)

    def give_up(self, short: Sequence[SlotNeed], *, late: bool) -> None:
        """Fail if the launcher cannot start slots, or none is registered."""
        check_supply(self.parts.server, self.spec, short, late=late)

    def connect(self, connect: Callable[[], ShardClients], coordinator: Coordinator) -> ShardClients:
        """Return a client that continues with restored shards."""
        self.recovery = ShardRecovery(self.parts, coordinator, connect)
        return self.recovery.shards

    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Replace lost workers by free slots, once their shards are there."""
        if self.recovery is None or not self.recovery.running:
            self._replacement.replace_lost(coordinator, now)

    def lost(self, job_slot: JobSlot, how: str) -> bool:
        """Restore a lost shard."""
        if self.recovery is None or job_slot not in self.parts.slots.shards:
            return False
        self.recovery.lose(job_slot, how)
        return True

    def review(self, coordinator: Coordinator, shards: ShardClients, remaining_s: float) -> Topology:
        """Change to groups if the planner expects a gain; tried once."""
        if not self._may_form_groups:
            return self
        mailbox = self.parts.mailbox
        load = ShardLoad.of(mailbox.call(shards.statistics))
        return mailbox.handle(lambda: self._form_groups(coordinator, load, remaining_s))

    def _form_groups(self, coordinator: Coordinator, load: ShardLoad, remaining_s: float) -> Topology:
        machines = {slot.name: "/".join(machine_of(slot.slot.hello)) for slot in self.parts.slots.living()}
        choice = coordinator.plan_groups(load, remaining_s, machines)
        if choice is None:
            return self
        self._may_form_groups = False
        if len(workers_by_member(self.parts, self.spec)) < self.spec.cluster.workers:
            return self  # lost workers leave gaps in the numbers
        groups = switch_to_groups(self.parts, self.spec, choice, coordinator)
        if groups is not None:
            self.close()
        return groups or self

    def close(self) -> None:
        """End snapshots and restorations of the shards."""
        if self.recovery is not None:
            self.recovery.close()
