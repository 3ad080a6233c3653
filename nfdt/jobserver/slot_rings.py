"""Rings of one job whose ranks are worker slots of any machines: no login, no launcher and no names of hosts."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nfdt.core.errors import NfdtError, PolicyRefused
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_log import JobLog, SlotNotes
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.outcome import SlotError
from nfdt.jobserver.placement import MachineId, machine_of, place_groups, reachable_members, returning_slots
from nfdt.jobserver.pool_slot import PoolSlot
from nfdt.jobserver.slot_ring import RankStart, SlotRing, count_neighbours
from nfdt.launch.horovod import NAME
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.ring import Ring, RingMaker

_log = logging.getLogger(__name__)

TAKE_POLL_S = 0.5  # interval of checks for free slots; any change of the pool is noticed at once
RETURN_S = 10.0  # time for the machine of a lost rank to offer a fresh slot, before another machine's is taken
SETTLE_S = 5.0  # time for more slots to register before slots of several machines are refused


class SlotRings(RingMaker):
    """Maker of the rings of one job in worker slots. Thread-safe.

    The job reserves as many slots as it has workers when it takes the first ones. A member of a group stays on the
    machine where its speed was measured.

    Args:
        server: The server.
        job_id: The job.
        slots: Slots of the job.
        job_log: Log of the job.
        notes: Output and spans of the ranks.
        workers: Number of the job's ranks.
        fail: Ends the job with the error of its code in a rank.

    Attributes:
        spans_machines: Whether a ring may have ranks on several machines.
    """

    forms_again = takes_slots = True

    def __init__(
        self,
        server: ServerContext,
        job_id: str,
        slots: JobSlots,
        job_log: JobLog,
        notes: SlotNotes,
        workers: int,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._server, self._job_id, self._slots, self._job_log = server, job_id, slots, job_log
        self._notes, self._workers, self._fail = notes, workers, fail
        self.spans_machines = server.insecure_allreduce
        self._lock = threading.Lock()
        self._rings: list[SlotRing] = []
        self._machines: dict[int, MachineId] = {}
        self._sought_since: float | None = None

    @property
    def machines(self) -> tuple[str, ...]:
        """Name of each worker's machine, by the worker's number; empty before they are placed."""
        with self._lock:
            return tuple("/".join(self._machines[member]) for member in sorted(self._machines))

    def place(self, groups: Sequence[Sequence[int]], *, together: bool) -> bool:
        """Reserve slots for all workers of the job, once; return whether they are reserved.

        Raises:
            PolicyRefused: There are enough slots, but a ring would span machines.
        """
        with self._lock:
            if self._machines:
                return True
        self._renew_slots()
        placed: dict[int, PoolSlot] = {}

        def choose(free: Sequence[PoolSlot], most: int) -> list[PoolSlot]:
            if most >= self._workers:
                placed.update(place_groups(self._fresh(free), groups, together=together))
            return list(placed.values())

        self._server.pool.reserve(self._job_id, choose)
        if not placed:
            self._sought_since = self._sought_since or time.monotonic()
            if together and time.monotonic() - self._sought_since >= SETTLE_S:
                self._refuse_plain_text(groups)
            return False
        with self._lock:
            self._machines = {member: machine_of(slot.hello) for member, slot in placed.items()}
        return True

    def adopt(self, slots: Mapping[int, pb.SlotHello]) -> None:
        """Reserve the slots of the job's flat workers, by the worker's number."""
        with self._lock:
            self._machines = {member: machine_of(hello) for member, hello in slots.items()}
        self._server.pool.keep_reserved(self._job_id, len(slots))

    def reachable(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return those of the waiting members whose machines have a free slot."""
        free = self._fresh([slot for slot in self._server.pool.plain_slots("worker") if slot.job_id is None])
        with self._lock:
            return reachable_members(free, members, self._machines)

    def claim(self, shape: RingShape) -> Ring:
        """Return the job's ring of this shape, or a new one, which takes its slots as soon as they are free."""
        with self._lock:
            own = next((ring for ring in self._rings if ring.shape == shape and ring.failure is None), None)
            if own is not None:
                return own
            name = f"{NAME}{secrets.token_hex(4)}"
            ring = SlotRing(name, shape, end_of=self._end_of, failed=self._on_failure, noted=self._notes.receive)
            self._rings.append(ring)
        threading.Thread(target=self._form, args=(ring,), name=name, daemon=True).start()
        return ring

    def end(self, rings: Sequence[Ring]) -> None:
        """End these rings; their ranks finish in order, and fresh slots take the place of their processes."""
        with self._lock:
            ended = [ring for ring in self._rings if ring in rings]
            self._rings = [ring for ring in self._rings if ring not in rings]
        for ring in ended:
            self._dismiss(ring)

    def release(self, *, usable: bool) -> None:
        """End all rings of the job."""
        with self._lock:
            rings = list(self._rings)
        self.end(rings)
        self._server.pool.unreserve(self._job_id)

    def _dismiss(self, ring: SlotRing) -> None:
        in_order = ring.end()
        pool = self._server.pool
        self._server.worlds.close(ring.name)
        pool.dismiss_ring(ring.name)
        for slot in ring.slots:
            pool.dismiss(slot, now=not in_order)
        pool.wake()

    # ---- forming

    def _form(self, ring: SlotRing) -> None:
        """Take the slots of a ring, make them its ranks, and wait until all have joined."""
        slots: list[PoolSlot] = []
        try:
            store = self._server.worlds.open(ring.name, ring.shape.size)
            slots = self._await_slots(ring)
            if slots:
                ring.assign(slots, RankStart(self._job_id, store, self._slots.artifact_dir, self._neighbours(ring)))
                self._job_log.write("info", f"{ring.name}: {ring.origin}")
                self._server.pool.wake()
                ring.await_ranks()
        except NfdtError as error:
            ring.refuse(error)
            for slot in slots:  # the ring knows those that it has made ranks
                self._server.pool.dismiss(slot, now=True)
            self._server.pool.wake()
        except Exception as error:  # the job waits for this thread
            _log.exception("%s", ring.name)
            ring.fail(f"{type(error).__name__}: {error}")
        finally:
            self._server.worlds.close(ring.name)
            if ring.ended or ring.failure:
                self._dismiss(ring)  # it ended while it took its slots

    def _neighbours(self, ring: SlotRing) -> Callable[[PoolSlot, int], int]:
        members = members_of(ring.shape)

        def count(slot: PoolSlot, own: int) -> int:
            with self._lock:
                return count_neighbours(self._machines, members, machine_of(slot.hello))

        return count

    def _await_slots(self, ring: SlotRing) -> list[PoolSlot]:
        """Return the slots of a ring once they are free; none if the ring is ended before."""
        pool, began = self._server.pool, time.monotonic()
        while not ring.ended:
            self._renew_slots()
            elsewhere = self.spans_machines and time.monotonic() - began >= RETURN_S
            slots = self._slots.take_ranks(partial(self._choose, ring, elsewhere), ring.receive, ring.note)
            if slots:
                return slots
            pool.wait(TAKE_POLL_S)
        return []

    def _choose(self, ring: SlotRing, elsewhere: bool, free: Sequence[PoolSlot], most: int) -> list[PoolSlot]:
        members = members_of(ring.shape)
        with self._lock:
            slots = returning_slots(self._fresh(free), members, self._machines, elsewhere=elsewhere)
            if most < len(slots):
                return []
            self._machines |= {m: machine_of(slot.hello) for m, slot in zip(members, slots, strict=False)}
            return slots

    def _renew_slots(self) -> None:
        """End free slots that have served a job: fresh ones take their places."""
        self._server.pool.evict_used()
        self._slots.evict_other_sessions()

    def _fresh(self, free: Sequence[PoolSlot]) -> list[PoolSlot]:
        return [slot for slot in free if not slot.used and self._slots.accepts(slot)]

    def _refuse_plain_text(self, groups: Sequence[Sequence[int]]) -> None:
        """Raise if there are enough slots, but not for each ring on one machine."""
        slots = self._fresh(self._server.pool.plain_slots("worker"))
        if not place_groups(slots, groups, together=False):
            return
        sizes = Counter(machine_of(slot.hello) for slot in slots)
        found = ", ".join(f"{count} on {host}" for (_, host), count in sizes.most_common())
        wanted = " and ".join(str(len(members)) for members in groups)
        raise PolicyRefused(
            "The ranks of an allreduce on several machines exchange gradients in plain text. "
            f"Expected: {wanted} worker slots on one machine each, or a server started with --insecure-allreduce. "
            f"Received: {found}. Start the server with --insecure-allreduce if its network is private, offer more "
            "slots on one machine, or take an algorithm without an allreduce between machines, such as ddc-asgd."
        )

    # ---- failures

    def _end_of(self, hello: pb.SlotHello) -> str:
        end = self._server.end_of(hello)
        return str(end or f"its process ended ({hello.pid} on {hello.host}, slot {hello.name})")

    def _on_failure(self, ring: SlotRing, error: SlotError | None) -> None:
        self._dismiss_ranks(ring)
        if error is not None:
            self._fail(error)

    def _dismiss_ranks(self, ring: SlotRing) -> None:
        """End the remaining ranks of a broken ring at once."""
        self._server.worlds.close(ring.name)
        for slot in ring.slots:
            self._server.pool.dismiss(slot, now=True)
        self._server.pool.wake()


def members_of(shape: RingShape) -> tuple[int, ...]:
    """Return the numbers of the workers that are the ranks of a ring."""
    return shape.members or tuple(range(shape.size))
