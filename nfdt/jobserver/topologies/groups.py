"""Groups of ranks that push to shards, divided by the measured speeds of their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import GROUPS, TopologyView
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.ring_makers import admit_rings
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.group_slots import GroupSlots
from nfdt.jobserver.topologies.slot_supply import SlotNeed, check_supply, launch_shards, launch_workers
from nfdt.schedulers.group_shares import FixedSizes


class GroupsTopology(Topology):
    """Topology of groups of ranks; the leader of each group is one worker.

    Args:
        parts: Parts of the job.
        spec: Specification of the job.
        groups: Groups that have already started; None: they are formed by :meth:`form`.
    """

    view: ClassVar[TopologyView] = GROUPS

    def __init__(self, parts: JobParts, spec: JobSpec, groups: GroupSlots | None = None) -> None:
        super().__init__(parts, spec)
        self._groups = groups or GroupSlots(parts.rings, spec, parts.slots, parts.job_log)

    @classmethod
    def admit(cls, server: ServerContext, spec: JobSpec) -> None:
        """Refuse a job whose rings this server cannot or may not launch."""
        admit_rings(server, spec)

    @property
    def sizes(self) -> FixedSizes | None:
        """Batch sizes of the groups; None if the client feeds the batches."""
        return self._groups.sizes

    def start(self, shards: int) -> None:
        """Launch the rings and missing shards."""
        self._groups.start()
        if self.awaited_slots:
            launch_workers(self.parts.server, self.spec, self.spec.cluster.workers)
        launch_shards(self.parts.server, shards)

    def give_up(self, short: Sequence[SlotNeed], *, late: bool) -> None:
        """Fail if there are no shards, or too few slots for the ranks."""
        check_supply(self.parts.server, self.spec, short, late=late, all_at_once=True)

    @property
    def awaited_slots(self) -> int:
        """Number of worker slots that the groups wait for."""
        return self._groups.awaited_slots

    def form(self) -> None:
        """Measure the members and form the groups."""
        self._groups.form(self.parts.wait_for)

    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Report lost groups and form them again if possible; fail the job after the loss of the last one."""
        self._groups.report_losses()
        if ready := self._groups.recover(now):
            self.parts.slots.admit(ready, coordinator)
        if reason := self._groups.all_gone():
            coordinator.fail(reason)

    def review(self, coordinator: Coordinator, shards: ShardClients, remaining_s: float) -> Topology:
        """Adapt shares to the measured speeds; form other groups if speeds have changed permanently."""

        def adapt() -> None:
            leaders = self._groups.review(self.parts.wait_for, remaining_s, coordinator.retire_all)
            if leaders:
                coordinator.expect(len(leaders))
                self.parts.slots.admit(leaders, coordinator)

        self.parts.mailbox.handle(adapt)
        return self

    def share(self, worker: str) -> pb.GroupShare:
        """Return the rows and the rate of a group's members."""
        return self._groups.share_of(worker) or pb.GroupShare()

    def set_learning_rate(self, value: float) -> bool:
        """Set the rate of the members' own optimizer, if they push weight differences."""
        if self.spec.algorithm.outer != "delta":
            return False
        self._groups.learning_rate = value
        return True
