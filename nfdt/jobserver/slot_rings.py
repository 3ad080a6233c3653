"""Makers of the rings of jobs, and rings whose ranks are worker slots.

Slots may be of any machines: such a ring needs no login, no launcher and no names of hosts.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nfdt.core.errors import NfdtError, PolicyRefused, UsageError
from nfdt.core.host.keras_backend import TENSORFLOW
from nfdt.core.jobs.admission import backend_of
from nfdt.core.jobs.rank_backends import check_ranks
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.elastic_ring import ElasticSlotRing
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.outcome import SlotError
from nfdt.jobserver.placement import MachineId, free_seats, machine_of, place_groups, returning_slots
from nfdt.jobserver.pool_slot import PoolSlot
from nfdt.jobserver.slot_ring import SlotRing
from nfdt.launch.horovod import NAME, LaunchedRings
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
        slots: Slots of the job.
        job_log: Log of the job.
        fail: Ends the job with the error of its code in a rank.

    Attributes:
        spans_machines: Whether a ring may have ranks on several machines.
    """

    in_slots = True

    def __init__(self, slots: JobSlots, job_log: JobLog, fail: Callable[[BaseException], None]) -> None:
        self._server, self._job_id, self._slots = slots.server, slots.job_id, slots
        self._job_log, self._fail = job_log, fail
        self._workers = slots.spec.cluster.workers
        self.spans_machines = self._server.insecure_allreduce
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

    def reachable(self, members: Sequence[int], *, elsewhere: bool = False) -> tuple[int, ...]:
        """Return those of the waiting members for which a slot is free; see :meth:`RingMaker.reachable`."""
        slots = self._server.pool.plain_slots("worker")
        free = self._fresh([slot for slot in slots if slot.job_id is None and not slot.away])
        with self._lock:
            seats = free_seats(free, members, self._machines, elsewhere=elsewhere and self.spans_machines)
            self._machines |= {member: machine_of(slot.hello) for member, slot in seats.items()}
        return tuple(member for member in members if member in seats)

    def claim(self, shape: RingShape) -> Ring:
        """Return the job's ring of this shape, or a new one, which takes its slots as soon as they are free."""
        with self._lock:
            own = next((ring for ring in self._rings if ring.shape == shape and ring.failure is None), None)
            if own is not None:
                return own
            name = f"{NAME}{secrets.token_hex(4)}"
            kind = ElasticSlotRing if shape.elastic.elastic else SlotRing
            ring = kind(name, shape, end_of=self._server.end_of, failed=self._on_failure, job_log=self._job_log)
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
                ring.assign(slots, self._slots, store, self._others(ring))
                self._job_log.write("info", f"{ring.name}: {ring.origin}")
                self._server.pool.wake()
                ring.await_ranks()
                while isinstance(ring, ElasticSlotRing) and self._form_again(ring):
                    pass
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

    def _form_again(self, ring: ElasticSlotRing) -> bool:
        """Form the next world of a ring when its ranks change; return whether the ring goes on."""
        pool, worlds = self._server.pool, self._server.worlds
        worlds.close(ring.name)
        if (change := ring.await_change(partial(self._has_more, ring))) is None:
            return False
        ring.dissolve(change)
        lost = ring.lost
        for slot in lost:
            pool.dismiss(slot, now=True)
        pool.wake()
        gone = "; ".join(f"{slot.name} on {slot.hello.host} is lost: {how}" for slot, how in lost.items())
        slots = self._await_more(ring, gone)
        if not slots:
            return False
        ring.forget(lost)
        ring.begin_world()
        ring.assign(slots, self._slots, worlds.open(ring.name, len(slots)), Counter())
        pool.wake()
        text = f"ranks came or went: {len(slots)} are there now{gone and '. '}{gone}"
        self._job_log.write("warning" if gone else "info", f"{text}. {ring.name}: {ring.origin}")
        ring.await_ranks()
        return True

    def _await_more(self, ring: ElasticSlotRing, gone: str) -> list[PoolSlot]:
        """Return the survivors of a ring and free slots, as soon as they are enough; none if the ring has ended."""
        elastic, deadline = ring.shape.elastic, time.monotonic() + ring.shape.elastic.elastic_timeout_s
        least, more = elastic.min_workers or ring.shape.size, list[PoolSlot]()
        try:
            while not (ring.ended or ring.failure):
                self._renew_slots()
                if not (present := ring.present):
                    ring.fail(f"no rank is left that has its state. {gone}")
                elif elastic.reset_limit is not None and ring.changes >= elastic.reset_limit:
                    ring.fail(f"its ranks came or went more than reset_limit={elastic.reset_limit} times. {gone}")
                else:
                    lost = ring.lost
                    more = [slot for slot in more if slot not in lost]
                    choose = partial(self._choose_more, present, ring.lacks - len(more))
                    more += self._slots.assign_ranks(choose, ring.receive)
                    if (count := len(present) + len(more)) >= least:
                        return [*present, *more]
                    if time.monotonic() >= deadline:
                        limit = f"elastic_timeout_s={elastic.elastic_timeout_s}"
                        ring.fail(f"{count} ranks are there, fewer than {least}, for longer than {limit}. {gone}")
                self._server.pool.wait(TAKE_POLL_S)
        finally:
            if ring.ended or ring.failure:
                for slot in more:
                    self._server.pool.dismiss(slot, now=True)
        return []

    def _has_more(self, ring: ElasticSlotRing) -> bool:
        pool = self._server.pool
        self._renew_slots()
        free = [slot for slot in pool.plain_slots("worker") if slot.job_id is None and not slot.away]
        _, most = pool.attending("worker", job_id=self._job_id)
        return bool(self._choose_more(ring.present, ring.lacks, free, most))

    def _choose_more(
        self, present: Sequence[PoolSlot], lacks: int, free: Sequence[PoolSlot], most: int
    ) -> list[PoolSlot]:
        """Choose further ranks beside those that are present; on their machines if rings may not span machines."""
        machines = {machine_of(slot.hello) for slot in present}
        near = [slot for slot in self._fresh(free) if self.spans_machines or machine_of(slot.hello) in machines]
        return near[: max(0, min(lacks, most))]

    def _others(self, ring: SlotRing) -> Counter[MachineId]:
        """Return the number of the job's workers that are no ranks of this ring, by machine."""
        members = members_of(ring.shape)
        with self._lock:
            return Counter(machine for member, machine in self._machines.items() if member not in members)

    def _await_slots(self, ring: SlotRing) -> list[PoolSlot]:
        """Return the slots of a ring once they are free; none if the ring is ended before."""
        pool, began = self._server.pool, time.monotonic()
        while not ring.ended:
            self._renew_slots()
            elsewhere = self.spans_machines and time.monotonic() - began >= RETURN_S
            slots = self._slots.assign_ranks(partial(self._choose, ring, elsewhere), ring.receive)
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
        return [slot for slot in free if not slot.used and self._slots.accepts_rank(slot)]

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

    def _on_failure(self, ring: SlotRing, error: SlotError | None) -> None:
        """End the remaining ranks of a broken ring at once, and the job if its code raised in one of them."""
        self._server.worlds.close(ring.name)
        for slot in ring.slots:
            self._server.pool.dismiss(slot, now=True)
        self._server.pool.wake()
        if error is not None:
            self._fail(error)


def members_of(shape: RingShape) -> tuple[int, ...]:
    """Return the numbers of the workers that are the ranks of a ring."""
    return shape.members or tuple(range(shape.size))


def takes_slots(server: ServerContext, spec: JobSpec) -> bool:
    """Whether the ranks of a job are worker slots of the pool.

    With the launcher ``auto`` they are, on a shared server; and if Horovod, whose launchers are the others, is not
    theirs.
    """
    shape, of_horovod = RingShape.of(spec.cluster), backend_of(spec.versions) == TENSORFLOW
    return shape.in_slots or (shape.launcher == "auto" and not (server.embedded and of_horovod))


def make_rings(slots: JobSlots, job_log: JobLog, fail: Callable[[BaseException], None]) -> RingMaker | None:
    """Return the maker of a job's rings; None if this server can make none."""
    if takes_slots(slots.server, slots.spec):
        return SlotRings(slots, job_log, fail)
    return None if slots.server.rings is None else LaunchedRings(slots.server.rings, slots.job_id)


def admit_rings(server: ServerContext, spec: JobSpec) -> None:
    """Refuse a job whose ranks cannot or may not be launched here.

    Raises:
        CaptureError: See :func:`nfdt.core.jobs.rank_backends.check_ranks`.
        UsageError: The server launches no rings, Horovod is not installed, or the launcher is missing.
        PolicyRefused: See :func:`refuse_reach`.
    """
    check_ranks(spec.algorithm, spec.cluster, backend_of(spec.versions))
    shape, from_slots = RingShape.of(spec.cluster), takes_slots(server, spec)
    if from_slots and not server.embedded:
        refuse_reach(shape)
    if from_slots:
        return
    if server.rings is None:
        raise UsageError("This server starts no Horovod rings: it was started without slots of its own.")
    if importlib.util.find_spec("horovod") is None:
        raise UsageError(
            f"algorithm={spec.algorithm.name!r}: expected Horovod on the server's machine. Received: none. "
            "Run scripts/install-horovod there."
        )
    shape = RingShape.of(spec.cluster)
    if not server.embedded:
        refuse_reach(shape)
    server.rings.check(shape)


def refuse_reach(shape: RingShape) -> None:
    """Refuse jobs for which a shared server would log in elsewhere, or read, run or write a file that the job names.

    Raises:
        PolicyRefused: The job requests that.
    """
    if shape.hosts or shape.hostfile or shape.elastic.network_interfaces or shape.launcher == "world":
        raise PolicyRefused(
            "A shared server logs in nowhere on a job's behalf. Expected: a job without hosts, hostfile, "
            "network_interfaces or launcher='world'. Run the script without server=, or start it with mpirun."
        )
    if shape.files:
        raise PolicyRefused(
            "A shared server reads, runs and writes no file that a job names. Expected: a job without "
            "host_discovery_script, timeline or autotune_log. Received: "
            f"{', '.join(shape.files)}. Run the script without server=."
        )
