"""Slots of one job: acquired, named, assigned, released."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.jobs.admission import backend_of, version_conflict
from nfdt.core.jobs.runner import Role
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import is_loopback
from nfdt.core.wire.job_token import worker_token
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_slot import JobSlot, ShardState
from nfdt.jobserver.placement import spread_over_machines
from nfdt.jobserver.pool_slot import PoolSlot, SlotChoice, SlotListener, SlotUser
from nfdt.launch.ring import Ring

if TYPE_CHECKING:
    from nfdt.core.wire.certificates import CertificateAuthority

QUICK_DEATHS = 3  # consecutive number after which a job without older workers fails
QUICK_S = 10.0
SPARE_JOINS = 8  # replacements that are allowed in addition to twice the wanted number of workers


class JobSlots:
    """Shards and workers of one job. The caller holds the job's lock.

    Args:
        server: The server.
        job_id: The job.
        spec: Specification of the job.
        session: Client session; slots that have run its code serve no other.
        wanted: Number of workers that the job takes from the pool.

    Attributes:
        server: The server.
        job_id: The job.
        token: Key of the job: shards get it, workers get tokens derived from it.
        spec: Specification that shards and workers get.
        wanted: Number of workers that the job takes from the pool.
        ring: Name of the job's allreduce ring, whose slots the job takes; "" without one.
        last_death: Text about the last worker whose process ended.
        shards: Shards by number.
        workers: Workers by name, including lost ones.
        shard_key: Key of the current shards; the job's key until they are restored.
        shard_state: State from which shards start.
        incarnation: Number of the restorations of the shards.
    """

    def __init__(
        self,
        server: ServerContext,
        job_id: str,
        spec: JobSpec,
        session: str,
        token: str,
        wanted: int,
        *,
        portable: bool = True,
    ) -> None:
        self.server, self.job_id, self.spec, self.wanted = server, job_id, spec, wanted
        self._portable = portable
        self.token = self.shard_key = token
        self._user = SlotUser(job_id, session or job_id, spec.code, cluster=spec.cluster)
        self._encoded: tuple[JobSpec | None, str] = (None, "")
        self._joined = 0
        self._quick_deaths = 0
        self._newcomers = 0  # number of the first worker that joined after the first of these deaths
        self.last_death = ""
        self.ring = ""  # of an allreduce job, once it has one
        self.shards: list[JobSlot] = []
        self.workers: dict[str, JobSlot] = {}
        self.shard_state = ShardState()
        self.incarnation = 0

    def listen(self, listener: SlotListener) -> None:
        """Send the messages of the slots that the job takes from now on to a listener."""
        self._user = replace(self._user, listener=listener)

    def accepts(self, slot: PoolSlot) -> bool:
        """Whether a worker slot runs the versions that this job's code requires, and a backend that it can use."""
        if self.spec.code and version_conflict(self.spec.versions, slot.versions) is not None:
            return False
        return self._is_on_backend(slot) or (self._portable and not self.server.is_launched(slot))

    def accepts_rank(self, slot: PoolSlot) -> bool:
        """Whether a worker slot can be a rank of this job: all ranks run on the client's backend."""
        return self._is_on_backend(slot) and self.accepts(slot)

    def _is_on_backend(self, slot: PoolSlot) -> bool:
        return backend_of(slot.versions) == backend_of(self.spec.versions)

    @property
    def unfit(self) -> str:
        """Why worker slots that attend cannot serve this job, in parentheses; "" if all of them can."""
        unfit = [slot.versions for slot in self.server.pool.plain_slots("worker") if not self.accepts(slot)]
        if not unfit:
            return ""
        needed, found = backend_of(self.spec.versions), {backend_of(versions) for versions in unfit}
        why = f"there Keras runs on {' or '.join(sorted(found))}, and the job needs KERAS_BACKEND={needed}"
        if needed in found:
            why = version_conflict(self.spec.versions, unfit[0]) or why
        return f" ({len(unfit)} that attend{'s' if len(unfit) == 1 else ''} cannot be used: {why})"

    def _preferred(self, slots: list[PoolSlot]) -> list[PoolSlot]:
        """Return slots on the client's backend before others."""
        return sorted(slots, key=lambda slot: not self._is_on_backend(slot))

    def accepts_shard(self, slot: PoolSlot) -> bool:
        """Whether workers reach a shard in this slot; the leader of the job's ring is one in any case."""
        return bool(self.ring) or self.server.accepts_shard(slot.hello)

    @functools.cached_property
    def _authority(self) -> CertificateAuthority | None:
        """Authority of the certificates of the job's shards; None without TLS."""
        if not self.server.tls:
            return None
        from nfdt.core.wire.certificates import CertificateAuthority  # takes 0.1 s to import

        return CertificateAuthority(f"nfdt {self.job_id}")

    @property
    def shard_ca(self) -> bytes | None:
        """PEM certificate of the authority of the shards that are not on loopback; None without TLS."""
        networked = any(not is_loopback(shard.host) for shard in self.shards)
        return self._authority.cert if networked and self._authority is not None else None

    def evict_other_sessions(self) -> None:
        """End free slots that have run code of other sessions and so cannot serve this job."""
        self.server.pool.evict_other_sessions("shard", self._user.session, self.ring)
        self.server.pool.evict_other_sessions("worker", self._user.session, self.ring)

    def acquire_shards(self, count: int) -> int:
        """Take free shard slots; return the number of the job's shards."""
        for slot in self._take_shards(count - len(self.shards)):
            self.shards.append(JobSlot(slot, f"shard-{len(self.shards)}", len(self.shards)))
        return len(self.shards)

    def _take_shards(self, count: int) -> list[PoolSlot]:
        return self.server.pool.assign(
            self._user,
            "shard",
            count,
            ring=self.ring,
            accepts=self.accepts_shard,
            order=lambda slots: spread_over_machines(slots, self.server.is_here),
        )

    def acquire_workers(self, count: int) -> list[JobSlot]:
        """Take free worker slots for up to ``count`` more workers, which get new numbers."""
        pool, most = self.server.pool, min(count, self.may_join)
        taken = pool.assign(self._user, "worker", most, ring=self.ring, accepts=self.accepts, order=self._preferred)
        return [self._add(slot) for slot in taken]

    @property
    def may_join(self) -> int:
        """Number of workers that may still replace lost ones."""
        return max(0, 3 * self.wanted + SPARE_JOINS - self._joined)

    def died(self, job_slot: JobSlot, how: str) -> bool:
        """Record the end of a worker's process; return whether workers end right after their start and none is left."""
        self.last_death = f"{job_slot.name} is lost: {how}"
        age_s = 0.0 if job_slot.started_at is None else self.server.clock.now() - job_slot.started_at
        if age_s >= QUICK_S and job_slot.report.get("steps"):
            self._quick_deaths = 0
            return False
        if not self._quick_deaths:
            self._newcomers = self._joined
        self._quick_deaths += 1
        return self._quick_deaths >= QUICK_DEATHS and all(s.index >= self._newcomers for s in self.living())

    def assign_ranks(self, choose: SlotChoice, listener: SlotListener) -> list[PoolSlot]:
        """Take the free worker slots that a function chooses for the ranks of a ring, with their own listener."""
        return self.server.pool.assign_chosen(replace(self._user, listener=listener), "worker", choose)

    def acquire_leader(self, ring: Ring) -> JobSlot | None:
        """Take the slot of a group's rank 0, if it is registered."""
        taken = self.server.pool.assign(self._user, "worker", 1, ring=ring.name)
        return self._add(taken[0], ring.shape.members) if taken else None

    def _add(self, slot: PoolSlot, members: tuple[int, ...] = ()) -> JobSlot:
        job_slot = JobSlot(slot, f"worker-{self._joined}", self._joined, members=members)
        self._joined += 1
        self.workers[job_slot.name] = job_slot
        return job_slot

    def take_over(self, shard: JobSlot, worker: JobSlot) -> bool:
        """Assign both positions to the ring's next leader; return whether it is registered."""
        pool, ring = self.server.pool, self.ring
        if not pool.attending("shard", ring=ring)[1] or not pool.attending("worker", ring=ring)[1]:
            return False
        for job_slot in (shard, worker):
            role: Role = "shard" if job_slot is shard else "worker"
            (slot,) = pool.assign(self._user, role, 1, ring=ring)
            job_slot.slot, job_slot.address, job_slot.failing_over, job_slot.call = slot, "", False, 0
        return True

    def living(self) -> list[JobSlot]:
        """Return the workers that have not left the job."""
        return [job_slot for job_slot in self.workers.values() if not job_slot.gone]

    @property
    def ranks(self) -> int:
        """Number of ranks that the job's ring has reported; 0 before its first report."""
        return max((int(job_slot.report.get("ranks", 0)) for job_slot in self.living()), default=0)

    def job_slot_of(self, slot: PoolSlot) -> JobSlot | None:
        """Return the position of a slot in the job, or None."""
        return next((job_slot for job_slot in (*self.shards, *self.workers.values()) if job_slot.slot is slot), None)

    @property
    def _spec_json(self) -> str:
        """The specification, encoded once for all slots."""
        if self._encoded[0] is not self.spec:
            self._encoded = self.spec, self.spec.model_dump_json()
        return self._encoded[1]

    def start_shard(self, job_slot: JobSlot) -> None:
        """Assign a shard to a slot."""
        message = pb.ShardAssignment(
            job_id=self.job_id,
            spec_json=self._spec_json,
            index=job_slot.index,
            shards=len(self.shards),
            artifact_dir=self.artifact_dir(job_slot.slot),
            job_token=self.shard_key,
            state=self.shard_state.state,
            records=self.shard_state.records,
            incarnation=self.incarnation,
        )
        if self._authority is not None and not is_loopback(job_slot.host):
            pair = self._authority.issue([job_slot.host])
            message.tls_cert, message.tls_key = pair.cert, pair.key
        job_slot.slot.send(pb.Assignment(shard=message))

    def start_worker(self, job_slot: JobSlot, here: int) -> None:
        """Assign a worker to a slot; ``here`` is the number of the job's workers that share this machine's cores."""
        local = self.server.is_here(job_slot.slot.hello)
        job_slot.started_at = self.server.clock.now()
        message = pb.WorkerAssignment(
            job_id=self.job_id,
            spec_json=self._spec_json,
            worker=job_slot.name,
            index=job_slot.index,
            shards=[shard.address for shard in self.shards],
            artifact_dir=self.artifact_dir(job_slot.slot),
            job_token=worker_token(self.token, job_slot.name),
            shard_token=worker_token(self.shard_key, job_slot.name),
            incarnation=self.incarnation,
            shard_ca=self.shard_ca or b"",
            threads=max(1, self.server.cores // max(1, here)) if local and not job_slot.slot.hello.ring else 0,
        )
        job_slot.slot.send(pb.Assignment(worker=message))

    def replace_shard(self, job_slot: JobSlot) -> bool:
        """Give the position of a lost shard to a free slot; return whether there is one."""
        taken = self._take_shards(1)
        if taken:
            job_slot.slot, job_slot.failing_over = taken[0], False
        return bool(taken)

    def restart_shards(self, incarnation: int) -> None:
        """Start every shard again from ``shard_state``, with another key."""
        self.incarnation = incarnation
        self.shard_key = secrets.token_hex(32)
        for job_slot in self.shards:
            job_slot.address = ""
        for job_slot in self.shards:
            self.start_shard(job_slot)

    def move_message(self, worker: JobSlot) -> pb.MoveShards:
        """Return the message with which a worker finds the restored shards."""
        return pb.MoveShards(
            job_id=self.job_id,
            incarnation=self.incarnation,
            shards=[shard.address for shard in self.shards],
            shard_token=worker_token(self.shard_key, worker.name),
            shard_ca=self.shard_ca or b"",
        )

    def move_workers(self) -> None:
        """Send the addresses of the restored shards to all workers."""
        for job_slot in self.living():
            if job_slot.started_at is not None:
                job_slot.slot.send(pb.Assignment(move_shards=self.move_message(job_slot)))

    def artifact_dir(self, slot: PoolSlot) -> str:
        """Return the directory in which a slot can read the job's artifacts in place; "" if it must fetch them."""
        return str(self.server.artifacts.root) if self.server.is_here(slot.hello) else ""

    def admit(self, job_slots: Iterable[JobSlot], coordinator: Coordinator) -> None:
        """Admit workers to the training."""
        here = sum(self.server.is_here(job_slot.slot.hello) for job_slot in self.living())
        for job_slot in job_slots:
            coordinator.joined(job_slot.name, job_slot.index, job_slot.details)
            job_slot.admitted = True
            if job_slot.started_at is None:
                self.start_worker(job_slot, here)

    def release_all(self) -> None:
        """Release every slot at the end of the job."""
        for job_slot in (*self.workers.values(), *self.shards):
            self.server.pool.release(job_slot.slot, self.job_id)

    def release(self, job_slot: JobSlot) -> None:
        """Remove a slot from the job; it is free as soon as its process has dropped the job."""
        job_slot.gone = True
        self.server.pool.release(job_slot.slot, self.job_id)

    def shut_down(self, job_slot: JobSlot) -> None:
        """Remove a slot from the job, and make its process, which still answers, exit."""
        job_slot.gone = True
        if not job_slot.admitted:
            del self.workers[job_slot.name]  # it has no statistics
        self.server.pool.dismiss(job_slot.slot)

    def kill(self, job_slot: JobSlot) -> None:
        """Remove a slot from the job, and kill its process, which does not answer, if that is possible."""
        job_slot.gone = True
        self.server.pool.dismiss(job_slot.slot)
        self.server.kill(job_slot.slot.hello)
