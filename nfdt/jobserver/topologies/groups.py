"""Groups of ranks that push to shards: their rings, members and leaders, and their shares of the work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.group_plan import GroupPlan, groups_event, name_of
from nfdt.coordinator.topology_view import GROUPS, TopologyView
from nfdt.core.errors import JobFailed
from nfdt.core.specs.horovod_options import RingElastic
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.outcome import SlotError, explained
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.group_recovery import GroupRecovery
from nfdt.jobserver.topologies.slot_supply import launch_shards, launch_workers
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.ring import Ring
from nfdt.schedulers.group_shares import FixedSizes, GroupShare
from nfdt.schedulers.grouping import Groups

Members = tuple[int, ...]
RING = "ring"  # allreduce that a group has timed: for the server, not for history.nfdt
RECENT = "recent"  # times of the latest steps of each member of a group: for the server, not for history.nfdt


class GroupsTopology(Topology):
    """Topology of groups of ranks: it forms groups, forms them again when speeds change, and divides the work.

    A group is a Horovod ring of its own. For the coordinator its leader, rank 0, is one worker.

    Args:
        parts: Parts of the job.
        spec: Specification of the job.
        planned: Groups that are already chosen. Without them, and without groups in the specification, all members
            are measured first.
    """

    view: ClassVar[TopologyView] = GROUPS

    def __init__(self, parts: JobParts, spec: JobSpec, planned: Groups | None = None) -> None:
        super().__init__(parts, spec)
        if parts.rings is None:
            raise JobFailed("This server starts no Horovod worlds: it was started without slots of its own.")
        self._rings, self._slots, self._job_log = parts.rings, parts.slots, parts.job_log
        self._plan = GroupPlan(spec)
        self._plan.spans_machines = self._rings.spans_machines
        self._recovery = GroupRecovery(self._rings, self._job_log)
        self._rings_of: dict[Members, Ring] = {}
        self._leaders: dict[Members, JobSlot] = {}
        self._planned = self._plan.explicit or planned
        self._first: Groups = ()  # once the workers have machines
        self._measured_steps: dict[tuple[str, str], int] = {}  # by leader and member
        self._shares: dict[str, GroupShare] = {}
        self._reported: set[Members] = set()
        self._given_up: set[Members] = set()
        self._cost_s = 0.0
        self.sizes = FixedSizes(spec.fit.batch_size) if spec.train.kind == "arrays" else None

    # ---- start

    def start(self, shards: int) -> None:
        """Launch the initial rings and missing shards.

        Raises:
            JobFailed: One of the rings has ended.
            PolicyRefused: The groups that the job asks for span machines, which this server does not allow.
        """
        if self._place():
            self._launch(self._first)
        for members in self._first:
            self._check(members)
        if self.awaited_slots:
            launch_workers(self.parts.server, self.spec, self.spec.cluster.workers)
        launch_shards(self.parts.server, shards)

    def _place(self) -> bool:
        """Find machines for the members; the members of one machine are measured together."""
        together = self._plan.explicit is not None and not self._rings.spans_machines
        everybody = (tuple(range(self.spec.cluster.workers)),)
        if not self._first and self._rings.place(self._planned or everybody, together=together):
            network = self._plan.network = replace(self._plan.network, machines=self._rings.machines)
            self._planned = None if self._planned is None else self._plan.allowed(self._planned)
            self._first = self._planned or tuple(network.parts(everybody[0]))
        return bool(self._first)

    @property
    def awaited_slots(self) -> int:
        """Number of worker slots that the initial rings wait for."""
        if not self._first:
            return self.spec.cluster.workers
        return sum(self._rings_of[members].awaited_slots for members in self._first if members in self._rings_of)

    def form(self) -> None:
        """Start the initial rings; if groups are to be found by speed, measure the members and form them."""
        self.parts.wait_for(lambda: [] if self._place() else [f"{self.spec.cluster.workers} worker slots"])
        self._bring_up(self._first)
        groups = self._planned or self._plan.choose(self._living())
        if set(groups) != set(self._leaders):
            self._change(groups)
        self._announce("as asked for" if self._plan.explicit else "planned" if self._planned else "measured")

    def disband(self) -> None:
        """End all rings and shut down their leaders."""
        for job_slot in self._leaders.values():
            self._slots.shut_down(job_slot)
        self._rings.end(list(self._rings_of.values()))

    def leaders(self) -> list[JobSlot]:
        """Return the leaders of live groups."""
        return [self._leaders[members] for members in self._living()]

    def review(self, coordinator: Coordinator, shards: ShardClients, remaining_s: float) -> Topology:
        """Adapt shares to the speeds of the last epoch; form other groups if speeds have changed permanently."""
        self.parts.mailbox.handle(lambda: self._adapt(coordinator, remaining_s))
        return self

    def _adapt(self, coordinator: Coordinator, remaining_s: float) -> None:
        self._read_reports()
        living = self._living()
        if not living or not self._plan.settled or self._recovery.forming:
            return
        if grown := self._growing(living, remaining_s):
            self._grow(coordinator, grown)
            if rest := self._living():
                self._share_out(rest)
            return
        groups = self._plan.review(living, remaining_s, self._cost_s)
        if not groups:
            self._share_out(living)
            return
        coordinator.retire_all()
        self._change(groups)
        self._announce("speeds have changed")
        leaders = self.leaders()
        coordinator.expect(len(leaders))
        self._slots.admit(leaders, coordinator)

    def _shape(self, members: Members) -> RingShape:
        cluster, size = self.spec.cluster, len(members)
        shape = replace(RingShape.of(cluster), size=size, members=members, neighbours=cluster.workers - size)
        return replace(shape, elastic=RingElastic())

    def _launch(self, groups: Groups) -> None:
        for members in groups:
            if members not in self._rings_of:
                shape = self._shape(members)
                ring = self._rings_of[members] = self._rings.claim(shape)
                self._job_log.write("info", f"group {name_of(members)}: {ring.origin}")

    def _check(self, members: Members) -> None:
        ring = self._rings_of[members]
        if failure := ring.failure:
            raise explained(ring, JobFailed(f"Group {name_of(members)} did not come up. {failure}"))

    def _bring_up(self, groups: Groups) -> None:
        """Launch rings, acquire their leaders, and wait until every member is measured."""
        began = time.monotonic()
        self._launch(groups)
        self.parts.wait_for(lambda: self._acquire_leaders(groups))
        if not self._living():
            self._check(groups[-1])
        self._cost_s = time.monotonic() - began
        self._read_reports()

    def _acquire_leaders(self, groups: Groups) -> list[str]:
        """Assign workers to registered leaders; return the groups whose members are still to be measured."""
        for members in groups:
            if not self._is_lost(members):
                self._acquire_leader(members)
        waiting = [members for members in groups if not (self._is_lost(members) or self._is_measured(members))]
        return [f"group {name_of(members)}" for members in waiting]

    def _acquire_leader(self, members: Members) -> None:
        leader = self._leaders.get(members)
        if leader is None or leader.gone:
            self._check(members)
        if leader is None and (leader := self._slots.acquire_leader(self._rings_of[members])):
            self._leaders[members] = leader
            self._slots.start_worker(leader, 0)

    def _is_lost(self, members: Members) -> bool:
        """Whether the ring has ended and the job continues without it; all of the initial groups must start."""
        leader = self._leaders.get(members)
        gone = leader is None or leader.gone
        return gone and self._plan.settled and self._rings_of[members].failure is not None

    def _is_measured(self, members: Members) -> bool:
        leader = self._leaders.get(members)
        return leader is not None and not leader.gone and RECENT in leader.report

    def _change(self, groups: Groups) -> None:
        """End the rings of dissolved groups, and start those of new groups."""
        ended = [members for members in self._rings_of if members not in groups]
        for members in ended:
            if members in self._leaders:
                self._slots.shut_down(self._leaders.pop(members))
        self._rings.end([self._rings_of.pop(members) for members in ended])
        self._bring_up(groups)

    # ---- speeds and shares

    def _read_reports(self) -> None:
        """Pass to the plan the rings that groups have timed and the steps of members since the last call."""
        for members, job_slot in self._leaders.items():
            if ring := job_slot.report.get(RING):
                self._plan.ring_measured(members, ring)
            for member, (steps, recent) in job_slot.report.get(RECENT, {}).items():
                fresh = steps - self._measured_steps.get((job_slot.name, member), 0)
                self._measured_steps[job_slot.name, member] = steps
                for rows, seconds in recent[-fresh:] if fresh > 0 else ():
                    self._plan.measured(member, int(rows), float(seconds))
        reports = [
            job_slot.report for job_slot in self._leaders.values() if not job_slot.gone and job_slot.report.get("steps")
        ]
        if steps := sum(report["steps"] for report in reports):
            self._plan.exchange_s = sum(report.get("exchange_s", 0.0) for report in reports) / steps

    def _living(self) -> Groups:
        return tuple(sorted(members for members, job_slot in self._leaders.items() if not job_slot.gone))

    def _announce(self, reason: str) -> None:
        """Divide the work among the groups that are formed, and record them."""
        groups = self._living()
        self._plan.settle(groups)
        self._share_out(groups)
        shares = [self._shares[self._leaders[members].name] for members in groups]
        self._job_log.record("groups", groups_event(shares, reason))
        text = " | ".join(f"{name_of(s.members)} ({s.step_s * 1000:.0f} ms, rate x{s.rate:.2f})" for s in shares)
        self._job_log.write("info", f"groups ({reason}, up in {self._cost_s:.1f} s): {text}")

    def _share_out(self, groups: Groups) -> None:
        self._shares = {self._leaders[share.members].name: share for share in self._plan.shares(groups)}
        if self.sizes is not None:
            self.sizes.state({worker: share.batch for worker, share in self._shares.items()})

    def share(self, worker: str) -> pb.GroupShare:
        """Return the rows and the rate of a group's members from its next epoch on."""
        share = self._shares.get(worker)
        if share is None:
            return pb.GroupShare()
        return pb.GroupShare(rows=share.rows, rate=share.rate)

    # ---- losses

    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Report lost groups and form them again if possible; fail the job after the loss of the last one."""
        self._report_losses()
        if ready := self._recover(coordinator, now):
            self._slots.admit(ready, coordinator)
        if reason := self._reason_without_groups():
            coordinator.fail(reason)

    def _report_losses(self) -> None:
        """Report the reason for the end of each ended ring once.

        Raises:
            SlotError: Code of the job raised an exception.
        """
        for members, ring in self._rings_of.items():
            if members not in self._reported and (failure := ring.failure):
                self._reported.add(members)
                reason = explained(ring, JobFailed(failure))
                if isinstance(reason, SlotError):
                    raise reason
                self._job_log.write("warning", f"Group {name_of(members)} is gone. {failure}")

    def _recover(self, coordinator: Coordinator, now: float) -> list[JobSlot]:
        """Form lost groups again; return the leaders that are ready to join."""
        if not self._plan.settled:
            return []
        for members, ring in list(self._rings_of.items()):
            if ring.failure and members not in self._given_up:
                trained = self._drop_leader(members, coordinator)
                again = self._recovery.form_again(members, now, trained=trained)
                self._replace(members, ring, members if again else ())
            elif (rest := self._recovery.shrink(members, ring, now)) != members:
                self._replace(members, ring, rest)
        ready = []
        for members in self._recovery.forming:
            if self._rings_of[members].failure is None:
                self._acquire_leader(members)
            if self._is_measured(members):
                self._recovery.done(members)
                ready.append(self._leaders[members])
        if ready:
            self._read_reports()
            self._announce("a group was formed again")
        return ready

    def _growing(self, living: Groups, remaining_s: float) -> dict[Members, Members]:
        """Return the groups that members without a group can join, each with its members then, where that pays."""
        placed = {member for members in self._rings_of for member in members}
        absent = [member for member in range(self.spec.cluster.workers) if member not in placed]
        returned = self._rings.reachable(absent, elsewhere=True) if absent else ()
        return self._plan.growing(living, returned, remaining_s, self._cost_s)

    def _grow(self, coordinator: Coordinator, groups: Mapping[Members, Members]) -> None:
        """Form groups again with more members; the others begin the next epoch without them."""
        for members, grown in groups.items():
            leader = self._leaders[members]
            coordinator.retire(leader.name)
            self._slots.shut_down(leader)
            self._recovery.grow(members, grown, self.parts.server.clock.now())
            self._replace(members, self._rings_of[members], grown)

    def _drop_leader(self, members: Members, coordinator: Coordinator) -> bool:
        """Remove the leader of a ring that has ended, whose own end may be known only later.

        Returns:
            Whether it has reported a step of the training.
        """
        leader = self._leaders.get(members)
        if leader is not None and not leader.gone:
            leader.gone = True
            coordinator.left(leader.name, "its ring has ended")
        return leader is not None and bool(leader.report.get("steps"))

    def _replace(self, members: Members, ring: Ring, following: Members) -> None:
        """Start the ring of ``following`` instead of a group's ring; of none if the group is given up."""
        if not following:
            self._given_up.add(members)
            return
        self._rings.end([ring])
        del self._rings_of[members]
        self._leaders.pop(members, None)
        self._reported.discard(members)
        self._launch((following,))

    def _reason_without_groups(self) -> str | None:
        """Return the reason why no group is left; None while one is live, or while the reason is not known yet."""
        if not self._leaders or self._living():
            return None
        failures = [ring.failure for ring in self._rings_of.values()]
        if any(failure is None for failure in failures):
            return None
        return f"All groups are gone. The last: {failures[-1]}"
