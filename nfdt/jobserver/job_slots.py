"""The slots that work for one job: what they are called, what they are told, what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nfdt.coordinator.topology_view import slots_of
from nfdt.core.jobs.admission import version_conflict
from nfdt.core.jobs.launcher import Role
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.job_token import worker_token
from nfdt.jobserver.context import Site
from nfdt.jobserver.slot_pool import Listener, Slot
from nfdt.launch.horovod import Ring

QUICK_DEATHS = 3  # in a row, and nobody left who was there before them: then the job is given up
QUICK_S = 10.0
SPARE_JOINS = 8  # workers that may take over from lost ones, besides twice the wanted number


@dataclass
class Seat:
    """One slot's place in the job.

    Attributes:
        address: Of a shard that serves.
        gone: It does not work for the job any more.
        members: Of the group that it leads.
        started_at: When it was told to be a worker; None before.
        admitted: It takes part in the training; until then it waits.
        report: What it last told of itself.
        call: The number of its last call of Next.
        reply: The answer to that one, once there is one.
    """

    slot: Slot
    name: str
    index: int
    address: str = ""
    gone: bool = False
    members: tuple[int, ...] = ()
    started_at: float | None = None
    admitted: bool = False
    vacant: bool = False  # of a ring whose speaker is gone: another one will sit here
    report: dict[str, Any] = field(default_factory=dict)
    call: int = 0
    reply: pb.NextReply | None = None

    @property
    def details(self) -> dict[str, Any]:
        """Which process it is."""
        hello = self.slot.hello
        process = {"slot": hello.name, "pid": hello.pid, "host": hello.host, "device": hello.device}
        return {**process, "group": list(self.members)} if self.members else process


class Crew:
    """Shards and workers of one job. The job's run serialises the calls.

    Args:
        site: The server.
        job_id: The job.
        spec: What it is.
        session: The client session; slots that have run its code serve no other.
        token: The job's key: shards get it, workers tokens made of it.
        listener: Told what the slots say.
    """

    def __init__(self, site: Site, job_id: str, spec: JobSpec, session: str, token: str, listener: Listener) -> None:
        self._site, self._job_id, self.spec = site, job_id, spec
        self._session = session or job_id
        self._token, self._listener = token, listener
        self._joined = 0
        self._quick_deaths = 0
        self._newcomers = 0  # the number from which on workers have joined since the first of these deaths
        self.last_death = ""
        self.ring = ""  # of an allreduce job, once it has one
        self.shards: list[Seat] = []
        self.workers: dict[str, Seat] = {}

    def accepts(self, slot: Slot) -> bool:
        """Whether a worker slot runs the versions that this job's code needs."""
        return not self.spec.code or version_conflict(self.spec.versions, slot.versions) is None

    def dismiss_strangers(self) -> None:
        """End free slots that this job cannot have, so that nobody counts on them."""
        self._site.pool.dismiss_strangers("shard", self._session, self.ring)
        self._site.pool.dismiss_strangers("worker", self._session, self.ring)

    def recruit_shards(self, count: int) -> int:
        """Take free shard slots; how many there are now."""
        taken = self._site.pool.take(
            "shard",
            count - len(self.shards),
            self._job_id,
            self._listener,
            session=self._session,
            code=self.spec.code,
            ring=self.ring,
        )
        for slot in taken:
            self.shards.append(Seat(slot, f"shard-{len(self.shards)}", len(self.shards)))
        return len(self.shards)

    def recruit_workers(self, count: int) -> list[Seat]:
        """Take free worker slots for up to ``count`` more workers; a newcomer always gets a new number."""
        taken = self._site.pool.take(
            "worker",
            min(count, self.may_join),
            self._job_id,
            self._listener,
            session=self._session,
            code=self.spec.code,
            accepts=self.accepts,
            ring=self.ring,
        )
        return [self._seat(slot) for slot in taken]

    @property
    def may_join(self) -> int:
        """How many more workers may take over from lost ones."""
        return max(0, 3 * slots_of(self.spec) + SPARE_JOINS - self._joined)

    def died(self, seat: Seat, how: str) -> bool:
        """Note how a worker's process has ended; whether they die as fast as they come and nobody else is left."""
        self.last_death = f"{seat.name} is lost: {how}"
        age_s = 0.0 if seat.started_at is None else self._site.clock.now() - seat.started_at
        if age_s >= QUICK_S and seat.report.get("steps"):
            self._quick_deaths = 0
            return False
        if not self._quick_deaths:
            self._newcomers = self._joined
        self._quick_deaths += 1
        return self._quick_deaths >= QUICK_DEATHS and all(s.index >= self._newcomers for s in self.living())

    def recruit_leader(self, ring: Ring) -> Seat | None:
        """Take the slot of a group's rank 0, once it attends."""
        pool, session = self._site.pool, self._session
        taken = pool.take("worker", 1, self._job_id, self._listener, session=session, ring=ring.name)
        return self._seat(taken[0], ring.shape.members) if taken else None

    def _seat(self, slot: Slot, members: tuple[int, ...] = ()) -> Seat:
        seat = Seat(slot, f"worker-{self._joined}", self._joined, members=members)
        self._joined += 1
        self.workers[seat.name] = seat
        return seat

    def succeed(self, shard: Seat, worker: Seat) -> bool:
        """Seat the next speaker of the job's ring; whether it is there."""
        pool, ring = self._site.pool, self.ring
        if not pool.attending("shard", ring=ring)[1] or not pool.attending("worker", ring=ring)[1]:
            return False
        for seat in (shard, worker):
            role: Role = "shard" if seat is shard else "worker"
            (slot,) = pool.take(role, 1, self._job_id, self._listener, session=self._session, ring=ring)
            seat.slot, seat.address, seat.vacant, seat.call = slot, "", False, 0
        return True

    def living(self) -> list[Seat]:
        """The workers whose slots work for the job."""
        return [seat for seat in self.workers.values() if not seat.gone]

    @property
    def ranks(self) -> int:
        """How many ranks the job's ring has said there are; 0 before it has."""
        return max((int(seat.report.get("ranks", 0)) for seat in self.living()), default=0)

    def seat_of(self, slot: Slot) -> Seat | None:
        """The place of a slot."""
        return next((seat for seat in (*self.shards, *self.workers.values()) if seat.slot is slot), None)

    def start_shard(self, seat: Seat) -> None:
        """Tell a slot to be a shard."""
        message = pb.ShardAssignment(
            job_id=self._job_id,
            spec_json=self.spec.model_dump_json(),
            index=seat.index,
            shards=len(self.shards),
            artifact_dir=self._artifact_dir(seat.slot),
            job_token=self._token,
        )
        seat.slot.send(pb.Assignment(shard=message))

    def start_worker(self, seat: Seat, here: int) -> None:
        """Tell a slot to be a worker; ``here`` is how many of the job's workers share this machine's cores."""
        local = self._site.is_here(seat.slot.hello)
        seat.started_at = self._site.clock.now()
        message = pb.WorkerAssignment(
            job_id=self._job_id,
            spec_json=self.spec.model_dump_json(),
            worker=seat.name,
            index=seat.index,
            shards=[shard.address for shard in self.shards],
            artifact_dir=self._artifact_dir(seat.slot),
            job_token=worker_token(self._token, seat.name),
            threads=max(1, self._site.cores // max(1, here)) if local and not seat.slot.hello.ring else 0,
        )
        seat.slot.send(pb.Assignment(worker=message))

    def count_here(self) -> int:
        """How many living workers run on this machine."""
        return sum(self._site.is_here(seat.slot.hello) for seat in self.living())

    def _artifact_dir(self, slot: Slot) -> str:
        return str(self._site.artifacts.root) if self._site.is_here(slot.hello) else ""

    def release(self) -> None:
        """The job is over: every slot becomes free as soon as it has dropped it."""
        for seat in (*self.workers.values(), *self.shards):
            self._site.pool.release(seat.slot, self._job_id)

    def let_go(self, seat: Seat) -> None:
        """A slot works for the job no more, and is free once it has dropped it."""
        seat.gone = True
        self._site.pool.release(seat.slot, self._job_id)

    def send_away(self, seat: Seat) -> None:
        """A slot that answers leaves the job in order, and its process ends."""
        seat.gone = True
        if not seat.admitted:
            del self.workers[seat.name]  # it has done nothing that there is to tell of
        self._site.pool.dismiss(seat.slot)

    def dismiss(self, seat: Seat) -> None:
        """End a slot's process: it does not answer any more."""
        seat.gone = True
        self._site.pool.dismiss(seat.slot)
        self._site.kill(seat.slot.hello)
