"""How a job's parts come up: its ring or groups, its shards, its coordinator, its workers."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.effect_queue import STALL_AFTER_S
from nfdt.coordinator.progress import StallWatch
from nfdt.coordinator.topology_view import policy_of, seen_by_coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.context import Site
from nfdt.jobserver.desk import JobDesk, Parts
from nfdt.jobserver.job_slots import Seat
from nfdt.jobserver.outcome import explained
from nfdt.jobserver.shard_clients import ShardControl, connect_shards
from nfdt.jobserver.snapshots import StateComposer, merger_of
from nfdt.jobserver.topologies.failover import SUCCEED_S, Succession
from nfdt.launch.horovod import Ring
from nfdt.launch.horovod_command import RingShape, shown

LOOK_S = 0.2
START_S = 180.0  # of shards, and of the worlds of groups


class JobAssembly(JobDesk):
    """A job whose parts can be brought up.

    Attributes:
        ring: The allreduce ring that works for it, if it is such a job.
    """

    def __init__(self, site: Site, job_id: str, spec: JobSpec, session: str) -> None:
        super().__init__(site, job_id, spec, session)
        self.ring: Ring | None = None

    def claim_ring(self) -> Ring:
        """The job's ring, which comes up in the background.

        Raises:
            JobFailed: it has ended.
        """
        if self.ring is None:
            rings = self._site.rings
            assert rings is not None, "the scheduler admitted an allreduce job"
            self.ring = rings.claim(self.job_id, RingShape.of(self.spec.cluster))
            self.crew.ring = self.ring.name
            self.ring.news()  # of another job
            self.journal.tell("info", f"ring of {self.ring.shape.size} ranks: {shown(self.ring.command)}")
        if failure := self.ring.failure:
            raise explained(self.ring, JobFailed(failure))
        return self.ring

    def _assemble(self) -> Parts:
        site = self._site
        merger = merger_of(self.manifest, site.artifacts)
        shards = self._connect()
        if self.ring is not None and self.spec.cluster.elastic:
            deadline_s = self.spec.cluster.elastic_timeout_s + SUCCEED_S
            self._succession = Succession(
                self.ring, self.crew, site.pool, self._changed, self._connect, deadline_s, first=shards
            )
            shards = self._succession.shard
        sizes = self.groups.sizes if self.groups is not None else None
        coordinator = Coordinator(self._paced_spec(), policy_of(self.spec), site.clock, merger, sizes)
        return Parts(shards, StateComposer(shards, merger, site.artifacts), coordinator)

    def _connect(self) -> ShardControl:
        addresses = [seat.address for seat in self.crew.shards]
        return connect_shards(addresses, self.manifest, self._token, ca_file=self._site.shard_ca_file)

    def _paced_spec(self) -> JobSpec:
        """The job as its coordinator sees it: every epoch waits for this run, and only who is there is waited for."""
        count = max(1, len(self.crew.living()))
        spec = seen_by_coordinator(self.spec, count)
        cluster = spec.cluster.model_copy(update={"workers": count})
        return spec.model_copy(update={"attended": True, "cluster": cluster})

    def _await_shards(self) -> None:
        self._wait_for(lambda: [seat.name for seat in self.crew.shards if not seat.address])

    def _wait_for(self, missing: Callable[[], list[str]]) -> None:
        """Wait, holding the job's lock between looks, until nobody is missing.

        Raises:
            JobFailed: it takes too long.
        """
        deadline = self._clock.now() + START_S
        stall = StallWatch(self._clock.now(), STALL_AFTER_S)
        while waiting := missing():
            self._ending.check()
            now = self._clock.now()
            if now >= deadline:
                raise JobFailed(f"{', '.join(waiting)} did not come up within {START_S:.0f} s; see its log.")
            if (since := stall.stalled_s(now)) is not None:
                self.journal.stalled(waiting, since)
            self._changed.wait(LOOK_S)

    def _seat_workers(self, parts: Parts, seats: list[Seat]) -> None:
        here = self.crew.count_here()
        for seat in seats:
            parts.coordinator.joined(seat.name, seat.index, seat.details)
            seat.admitted = True
            if seat.started_at is None:
                self.crew.start_worker(seat, here)
