"""How a job's parts come up: its ring or groups, its shards, its coordinator, its workers."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.effect_queue import STALL_AFTER_S
from nfdt.coordinator.progress import StallWatch
from nfdt.coordinator.topology_view import policy_of, seen_by_coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.desk import JobDesk, Parts
from nfdt.jobserver.job_slots import JobSlot
from nfdt.jobserver.outcome import explained
from nfdt.jobserver.shard_clients import ShardControl, connect_shards
from nfdt.jobserver.snapshots import StateComposer, merger_of
from nfdt.jobserver.topologies.failover import SUCCEED_S, LeaderFailover
from nfdt.launch.horovod import Ring
from nfdt.launch.horovod_command import RingShape, shown

START_POLL_S = 0.2
START_TIMEOUT_S = 180.0  # of shards, and of the worlds of groups


class JobAssembly(JobDesk):
    """A job whose parts can be brought up.

    Attributes:
        ring: The allreduce ring that works for it, if it is such a job.
    """

    def __init__(self, server: ServerContext, job_id: str, spec: JobSpec, session: str) -> None:
        super().__init__(server, job_id, spec, session)
        self.ring: Ring | None = None

    def claim_ring(self) -> Ring:
        """The job's ring, which comes up in the background.

        Raises:
            JobFailed: it has ended.
        """
        if self.ring is None:
            rings = self._server.rings
            assert rings is not None, "the scheduler admitted an allreduce job"
            self.ring = rings.claim(self.job_id, RingShape.of(self.spec.cluster))
            self.slots.ring = self.ring.name
            self.ring.news()  # of another job
            self.job_log.tell("info", f"ring of {self.ring.shape.size} ranks: {shown(self.ring.command)}")
        if failure := self.ring.failure:
            raise explained(self.ring, JobFailed(failure))
        return self.ring

    def _assemble(self) -> Parts:
        server = self._server
        merger = merger_of(self.manifest, server.artifacts)
        shards = self._connect()
        if self.ring is not None and self.spec.cluster.elastic:
            deadline_s = self.spec.cluster.elastic_timeout_s + SUCCEED_S
            self._succession = LeaderFailover(
                self.ring, self.slots, server.pool, self._changed, self._connect, deadline_s, first=shards
            )
            shards = self._succession.shard
        sizes = self.groups.sizes if self.groups is not None else None
        coordinator = Coordinator(self._paced_spec(), policy_of(self.spec), server.clock, merger, sizes)
        return Parts(shards, StateComposer(shards, merger, server.artifacts), coordinator)

    def _connect(self) -> ShardControl:
        addresses = [job_slot.address for job_slot in self.slots.shards]
        return connect_shards(addresses, self.manifest, self._token, ca_file=self._server.shard_ca_file)

    def _paced_spec(self) -> JobSpec:
        """The job as its coordinator sees it: every epoch waits for this run, and only who is there is waited for."""
        count = max(1, len(self.slots.living()))
        spec = seen_by_coordinator(self.spec, count)
        cluster = spec.cluster.model_copy(update={"workers": count})
        return spec.model_copy(update={"attended": True, "cluster": cluster})

    def _await_shards(self) -> None:
        self._wait_for(lambda: [job_slot.name for job_slot in self.slots.shards if not job_slot.address])

    def _wait_for(self, missing: Callable[[], list[str]]) -> None:
        """Wait, holding the job's lock between looks, until nobody is missing.

        Raises:
            JobFailed: it takes too long.
        """
        deadline = self._clock.now() + START_TIMEOUT_S
        stall = StallWatch(self._clock.now(), STALL_AFTER_S)
        while waiting := missing():
            self._termination.check()
            now = self._clock.now()
            if now >= deadline:
                raise JobFailed(f"{', '.join(waiting)} did not come up within {START_TIMEOUT_S:.0f} s; see its log.")
            if (since := stall.stalled_s(now)) is not None:
                self.job_log.stalled(waiting, since)
            self._changed.wait(START_POLL_S)

    def _seat_workers(self, parts: Parts, job_slots: list[JobSlot]) -> None:
        here = self.slots.count_here()
        for job_slot in job_slots:
            parts.coordinator.joined(job_slot.name, job_slot.index, job_slot.details)
            job_slot.admitted = True
            if job_slot.started_at is None:
                self.slots.start_worker(job_slot, here)
