"""One allreduce ring of Horovod ranks; rank 0 is registered at the server as one worker and one shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.failover import FailoverMachine, Resume
from nfdt.coordinator.topology_view import ALLREDUCE, TopologyView
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.outcome import explained
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.failover import Failover, MovingShards
from nfdt.jobserver.topologies.slot_supply import SlotNeed, WorkerReplacement, launch_workers
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.horovod_log import describe
from nfdt.launch.ring import Ring, RingMaker

FAILOVER_S = 60.0  # time for a new leader in addition to the ring's own time limit


class AllreduceTopology(Topology):
    """Ranks that reduce gradients among themselves.

    Attributes:
        ring: The launched ring; None before :meth:`start`.
    """

    view: ClassVar[TopologyView] = ALLREDUCE

    def __init__(self, parts: JobParts, spec: JobSpec) -> None:
        super().__init__(parts, spec)
        self.ring: Ring | None = None
        self._failover: LeaderFailover | None = None
        self._replacement = WorkerReplacement(parts, self.view.slots_wanted(spec))

    def start(self, shards: int) -> None:
        """Claim the job's ring, which starts in the background."""
        rings = self.parts.rings
        assert rings is not None, "the scheduler admitted an allreduce job"
        if self.ring is None and rings.place([range(self.spec.cluster.workers)], together=not rings.spans_machines):
            self.ring = self._claim(rings)
        if self.awaited_slots:
            launch_workers(self.parts.server, self.spec, self.awaited_slots)
        if self.ring is not None and (failure := self.ring.failure):
            raise explained(self.ring, JobFailed(failure))

    def _claim(self, rings: RingMaker) -> Ring:
        ring = rings.claim(RingShape.of(self.spec.cluster))
        self.parts.slots.ring = ring.name
        ring.messages()  # drops those of an earlier job
        self.parts.job_log.write("info", f"ring of {ring.shape.size} ranks: {ring.origin}")
        return ring

    @property
    def awaited_slots(self) -> int:
        """Number of worker slots that the ring waits for."""
        return self.spec.cluster.workers if self.ring is None else self.ring.awaited_slots

    def give_up(self, short: Sequence[SlotNeed], *, late: bool) -> None:
        """Fail if there are too few slots for the ranks, or the ranks do not start in time."""
        if self.awaited_slots:
            super().give_up(short, late=late)
        elif late and self.ring is not None:
            cluster = self.spec.cluster
            script = cluster.host_discovery_script
            needed = f" {script} must name hosts with {cluster.min_workers or cluster.workers} slots." if script else ""
            raise JobFailed(
                f"The ranks did not come up within {self.spec.start_timeout_s:g} s; see {self.ring.log}. "
                f"Expected: {self.ring.origin}.{needed}"
            )

    def connect(self, coordinator: Coordinator) -> ShardClients:
        """Return the plain client, or for an elastic ring one that survives the loss of its leader."""
        if self.ring is None or not self.spec.cluster.elastic:
            return super().connect(coordinator)
        deadline_s = self.spec.cluster.elastic_timeout_s + FAILOVER_S
        self._failover = LeaderFailover(self.parts, coordinator, self.ring, deadline_s)
        return self._failover.shards

    def report(self) -> None:
        """Copy the ring's warnings into the job's log."""
        if self.ring is not None:
            stalls, texts = self.ring.messages()
            for stall in stalls:
                self.parts.job_log.record("stalled", describe(stall))
            for text in texts:
                self.parts.job_log.write("warning", text)

    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Fail the job if the ring's leader is permanently lost."""
        self._replacement.replace_lost(coordinator, now)

    def lost(self, job_slot: JobSlot, how: str, *, killed: bool = False) -> bool:
        """Let another rank of an elastic ring take over."""
        if self._failover is None:
            return False
        self._failover.lose(job_slot, how)
        return True

    def prepare_epoch(self, coordinator: Coordinator) -> bool:
        """Set the batch of an elastic ring by its number of ranks; wait until the ring has reported it."""
        if self._failover is None:
            return True
        ranks = self.parts.slots.ranks
        if ranks:
            coordinator.plan_with(self.view.effective_spec(self.spec, ranks=ranks))
        return ranks > 0

    def explain(self, error: BaseException) -> BaseException:
        """Return the failure that a rank reported, if there is one."""
        return error if self.ring is None else explained(self.ring, error)

    def close(self) -> None:
        """End a running failover, and calls to the leader's shard."""
        if self._failover is not None:
            self._failover.close()
            self._failover.shards.close()


class LeaderFailover(Failover):
    """Failover to the next leader of one job's ring, which takes the positions of the shard and the worker.

    For the coordinator the ring is one worker and one shard, whichever rank is the leader. So a lost leader is no lost
    worker: calls to the shard wait for the next leader, which gets the last instruction again.

    Args:
        parts: Parts of the job.
        coordinator: Coordinator of the job.
        ring: The ring.
        deadline_s: Time limit of a failover, in seconds.
    """

    def __init__(self, parts: JobParts, coordinator: Coordinator, ring: Ring, deadline_s: float) -> None:
        too_late = (
            f"The rank that spoke for the ring is gone. Expected: another one within {deadline_s:.0f} s. "
            f"Received: none; see {ring.log}. Submit the job again."
        )
        super().__init__(parts, coordinator)
        self._machine = FailoverMachine(parts.server.clock, deadline_s, too_late)
        self.shards = MovingShards(parts.connect_shards(), deadline_s, "rank of the ring", repeats_writes=True)
        self._ring = ring

    def _positions(self) -> list[JobSlot]:
        return [*self._slots.shards, *self._slots.living()]

    def _missing(self) -> Sequence[str]:
        shard, worker = self._positions()
        there = bool(shard.address)
        if self._machine.stage == "placing":
            there = shard.failing_over and worker.failing_over and self._slots.take_over(shard, worker)
        if not there and (failure := self._ring.failure):
            raise JobFailed(failure)
        return [] if there else ["the next leader"]

    def _start(self, attempt: int) -> None:
        self._slots.start_shard(self._positions()[0])

    def _resume(self, resume: Resume) -> None:
        worker = self._positions()[1]
        self._slots.start_worker(worker, 1)
        self._coordinator.resumed(worker.name, dict(worker.details))
