"""Slot processes that are registered at a job server, and the jobs that use them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from nfdt.core.clock import AwakeClock, Clock
from nfdt.core.errors import ProtocolError, ServerUnreachable, UsageError
from nfdt.core.host.code_user import COUNT as CODE_USERS
from nfdt.core.jobs.runner import Role, SlotCounts
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.jobs_pb2 import SlotDescription
from nfdt.core.work.slot_connection import STACKS_CHARACTERS
from nfdt.jobserver.pool_slot import JoinedSlot, PoolSlot, SlotChoice, SlotUser

_log = logging.getLogger(__name__)

MAX_SLOTS = 20_000
MAX_NAME = 200
RETURN_POLL_S = 0.1  # interval of checks of a process whose stream broke
BEATS_PER_S = 256  # heartbeats that a server receives from all slots together: they cost it some percent of a core
STACKS_S = 5.0  # in which a process says where its threads are
_SHOWN = ("name", "host", "pid", "role", "device", "versions")
REST = 4  # heartbeats of a slot for each of the server's, which only confirm the interval


class SlotPool:
    """All registered slots; any thread may call.

    Args:
        lives: Function that returns whether the process of a slot may still run, as far as this machine can determine.
        clock: Clock of the slots' silence; None: one that stands still while the server does.

    Attributes:
        demand: Number of workers that the next job of the queue lacks.
    """

    def __init__(self, lives: Callable[[pb.SlotHello], bool] = lambda hello: True, clock: Clock | None = None) -> None:
        self._lives, self._clock = lives, clock or AwakeClock()
        self.demand = 0
        self._changed = threading.Condition()
        self._slots: dict[PoolSlot, None] = {}  # in order of registration
        self._keys: dict[str, PoolSlot] = {}
        self._reserved: dict[str, int] = {}
        self._code_user = secrets.randbelow(CODE_USERS)  # so that two servers of a machine choose others

    def join(self, hello: pb.SlotHello, received: int = 0) -> JoinedSlot:
        """Add a process, or resume its stream after the assignment of number ``received``.

        Raises:
            ProtocolError: Role, name or patience are not valid, or there are too many slots.
        """
        if hello.role not in ("worker", "shard") or not 0 < len(hello.name) <= MAX_NAME:
            raise ProtocolError(f"Slot: expected a name and the role worker or shard. Received: {hello.role!r}.")
        if not f"{hello.name}{hello.host}{hello.device}".isprintable():  # terminals and logs show them
            raise ProtocolError(
                f"Slot: expected a name, host and device without control characters. Received: {hello.name!r}."
            )
        if not (seconds := hello.patience_s) >= 0:  # not for NaN either
            raise ProtocolError(f"Slot {hello.name}: expected a patience of at least 0 s. Received: {seconds}.")
        with self._changed:
            found = self._keys.get(hello.key) if hello.key else None
            if found is None and len(self._slots) >= MAX_SLOTS:
                raise ProtocolError(f"Slots: expected at most {MAX_SLOTS}.")
            slot = found or PoolSlot(hello)
            if found is None:
                self._slots[slot] = None
                if hello.key:
                    self._keys[hello.key] = slot
            slot.to_send.acknowledge(received)
            slot.stream, slot.away, slot.heard_at = slot.to_send.open(), False, self._clock.now()
            self._changed.notify_all()
            _log.info("%s slot %s attends%s", hello.role, hello.name, " again" if found else "")
            return JoinedSlot(slot, slot.stream, found is not None)

    def broke(self, slot: PoolSlot, stream: int) -> None:
        """Record a broken stream: a process that can resume it gets no work until then; any other one is removed."""
        if not slot.hello.key:
            self.leave(slot)
            return
        with self._changed:
            if slot.stream == stream:
                slot.away = True
                slot.to_send.open()  # ends the broken stream
                self._changed.notify_all()

    def lose(self, slot: PoolSlot, stream: int) -> None:
        """Remove a process whose stream broke, unless it resumes the stream in time.

        It has the time of its patience, and no more than its silence may last.
        """
        self.broke(slot, stream)
        deadline = self._clock.now() + min(slot.hello.patience_s, slot.lost_s)
        while (left := self._awaited_s(slot, stream, deadline)) > 0:
            self.wait(min(left, RETURN_POLL_S))
        self.leave(slot, stream)

    async def lose_on_loop(self, slot: PoolSlot, stream: int) -> None:
        """The same as :meth:`lose`; it waits on the event loop."""
        self.broke(slot, stream)
        deadline = self._clock.now() + min(slot.hello.patience_s, slot.lost_s)
        while (left := self._awaited_s(slot, stream, deadline)) > 0:
            await asyncio.sleep(min(left, RETURN_POLL_S))
        self.leave(slot, stream)

    def _awaited_s(self, slot: PoolSlot, stream: int, deadline: float) -> float:
        """Return the seconds for which the return of a slot is awaited; 0: it is back, or will not come."""
        with self._changed:
            if slot not in self._slots or slot.stream != stream or slot.dismissed or not self._lives(slot.hello):
                return 0.0
            return max(0.0, deadline - self._clock.now())

    def interval_s(self, heartbeat_s: float) -> float:
        """Return the seconds between two heartbeats of a slot whose job requests ``heartbeat_s``.

        On a server with many slots they are doubled until all slots together send no more than BEATS_PER_S.
        """
        least_s = len(self._slots) / BEATS_PER_S
        while heartbeat_s < least_s:
            heartbeat_s *= 2
        return heartbeat_s

    def beat(self, slot: PoolSlot) -> pb.Assignment:
        """Return the server's heartbeat, which states the interval of the slot's own from now on."""
        if slot.every_s != (every_s := self.interval_s(slot.heartbeat_s)):
            slot.every_s, slot.heard_at = every_s, self._clock.now()
        slot.told = True
        return pb.Assignment(heartbeat=pb.Heartbeat(every_s=every_s), received=slot.received)

    def beat_in_s(self, slot: PoolSlot) -> float:
        """Return the seconds from a message of the server to its next heartbeat."""
        known = slot.told and slot.every_s == self.interval_s(slot.heartbeat_s)
        return REST * slot.every_s if known else slot.heartbeat_s

    def silent_s(self, slot: PoolSlot) -> float | None:
        """Return the seconds since the last message of a slot; None if it sends no heartbeats.

        They are divided by :attr:`PoolSlot.stretch`, as if its heartbeats came as often as its job requests.
        """
        return (self._clock.now() - slot.heard_at) / slot.stretch if slot.beats else None

    def remove_silent(self) -> None:
        """Remove the slots that are silent for too long; called often."""
        with self._changed:
            now = self._clock.now()
            silent = [s for s in self._slots if s.beats and now - s.heard_at > s.lost_s * s.stretch]
        for slot in silent:
            limit_s = slot.lost_s * slot.stretch
            slot.silence = (
                f"{slot.name} on {slot.hello.host} gave no sign of life for {limit_s:g} s: its process, its "
                "machine or its network stands still"
            )
            self.leave(slot)

    def ended(self, name: str) -> None:
        """Remove the slots of this name, whose launcher reports their end."""
        with self._changed:
            slots = [slot for slot in self._slots if slot.name == name]
        for slot in slots:
            self.leave(slot)

    def leave(self, slot: PoolSlot, stream: int | None = None) -> None:
        """Remove a process, unless it has a newer stream than this one; call its job's listener."""
        with self._changed:
            if slot not in self._slots or stream not in (None, slot.stream):
                return
            del self._slots[slot]
            if self._keys.get(slot.hello.key) is slot:
                del self._keys[slot.hello.key]
            slot.to_send.end()
            listener = None if slot.released else slot.listener
            slot.released = slot.dismissed = True
            self._changed.notify_all()
        _log.info("%s slot %s is gone%s", slot.hello.role, slot.name, slot.silence and f": {slot.silence}")
        if listener is not None:
            listener(slot, "lost", None)

    def receive(self, slot: PoolSlot, message: pb.SlotMessage) -> None:
        """Forward a message to the listener; drop repeated messages and those of another job."""
        kind = message.WhichOneof("message")
        with self._changed:
            slot.heard_at = self._clock.now()
            slot.to_send.acknowledge(message.received)
            if message.HasField("usage"):
                slot.usage = message.usage
            if kind == "heartbeat":
                slot.beats = True
                return
            if slot.received < message.number:
                slot.received = message.number
            elif message.number:
                return
        if kind == "leaving":
            self.leave(slot)
            return
        if kind == "stacks":
            with self._changed:
                slot.stacks, slot.answers = message.stacks.text[:STACKS_CHARACTERS], slot.answers + 1
                self._changed.notify_all()
            return
        if kind not in ("ready", "finished", "failed", "draining", "output", "spans"):
            raise ProtocolError(f"Slot {slot.name}: expected ready, finished or failed. Received: {kind}.")
        with self._changed:
            if kind != "draining" and getattr(message, kind).job_id != slot.job_id:
                return
            listener = slot.listener if kind in ("output", "spans") or not slot.released else None
            if kind == "draining":
                slot.dismissed = True  # it gets no more work
                self._changed.notify_all()
            elif kind in ("finished", "failed"):
                slot.job_id, slot.listener = None, None
                self._changed.notify_all()
        if listener is not None:
            listener(slot, kind, message)

    def assign(
        self,
        user: SlotUser,
        role: Role,
        count: int,
        *,
        ring: str = "",
        accepts: Callable[[PoolSlot], bool] = lambda slot: True,
        order: Callable[[list[PoolSlot]], list[PoolSlot]] = list,
    ) -> list[PoolSlot]:
        """Assign up to ``count`` free slots to a job.

        Args:
            user: The job.
            role: Role of the slots.
            count: Maximum number of slots.
            ring: Name of the allreduce ring whose slots are requested; "" for slots without a ring.
            accepts: Function that returns whether the job can use a slot.
            order: Function that sorts the free slots; the first ones are taken.
        """

        def choose(free: Sequence[PoolSlot], most: int) -> Sequence[PoolSlot]:
            return order([slot for slot in free if accepts(slot)])[: max(min(count, most), 0)]

        with self._changed:
            if count > 0:
                self.evict_other_sessions(role, user.session, ring)
            return self.assign_chosen(user, role, choose, ring)

    def assign_chosen(self, user: SlotUser, role: Role, choose: SlotChoice, ring: str = "") -> list[PoolSlot]:
        """Assign the free slots that a function chooses to a job; see :meth:`assign`."""
        with self._changed:
            code_user = self._code_user_of(user.session) if user.code else None
            if user.code and code_user is None:
                return []
            taken = list(choose(self._free(role, ring), self._spare(role, ring, user.job_id)))
            for slot in taken:
                slot.job_id, slot.listener = user.job_id, user.listener
                slot.assigned = slot.released = False
                if user.code:
                    slot.code_user, slot.session = code_user, user.session
                slot.heartbeat_s, slot.lost_s = user.cluster.heartbeat_s, user.cluster.lost_s
                slot.every_s = self.interval_s(slot.heartbeat_s)
                slot.told = False
                slot.heard_at = self._clock.now()  # it has sent heartbeats at another interval
            return taken

    def _code_user_of(self, session: str) -> int | None:
        """Return the number of the user that runs the code of a session: that of its other slots, or a new one.

        None: all are those of other sessions that have slots.
        """
        taken = {slot.session: slot.code_user for slot in self._slots if slot.code_user is not None}
        if (known := taken.get(session)) is not None:
            return known
        numbers = set(taken.values())
        for _ in range(CODE_USERS):
            self._code_user = (self._code_user + 1) % CODE_USERS  # the number that was free for longest
            if self._code_user not in numbers:
                return self._code_user
        return None

    def reserve(self, job_id: str, choose: SlotChoice) -> list[PoolSlot]:
        """Reserve as many worker slots for a job as a function chooses, until :meth:`unreserve`.

        Other jobs get the free slots that are left when this one has as many: a slot that ends and is replaced while
        the job has it reserved does not go to another job.

        Returns:
            The chosen slots, which are not taken yet.
        """
        with self._changed:
            chosen = list(choose(self._free("worker", ""), self._spare("worker", "", job_id)))
            if chosen:
                self._reserved[job_id] = len(chosen)
            return chosen

    def keep_reserved(self, job_id: str, count: int) -> None:
        """Set the number of slots that are reserved for a job that has as many."""
        with self._changed:
            self._reserved[job_id] = count

    def unreserve(self, job_id: str) -> None:
        """End the reservation of a job."""
        with self._changed:
            self._reserved.pop(job_id, None)
            self._changed.notify_all()

    def _free(self, role: Role, ring: str) -> list[PoolSlot]:
        return [s for s in self._of(role, ring) if s.job_id is None and not s.away]

    def _spare(self, role: Role, ring: str, job_id: str) -> int:
        """Return the number of free slots that are not reserved for other jobs."""
        free = len(self._free(role, ring))
        if role != "worker" or ring or not self._reserved:
            return free
        held = Counter(slot.job_id for slot in self._of(role, ring))
        return free - sum(max(0, n - held[other]) for other, n in self._reserved.items() if other != job_id)

    def evict_used(self) -> None:
        """Dismiss the free worker slots that have served a job: a rank needs a fresh process."""
        with self._changed:
            for slot in self._free("worker", ""):
                if slot.used:
                    self._dismiss(slot)

    def evict_other_sessions(self, role: Role, session: str, ring: str = "") -> None:
        """Dismiss the free slots that have run code of another session, and so cannot serve this one."""
        with self._changed:
            for slot in self._of(role, ring):
                if slot.job_id is None and slot.session not in ("", session):
                    self._dismiss(slot)

    def evict(self, role: Role, unfit: Callable[[PoolSlot], bool]) -> None:
        """Dismiss the free slots for which a function returns True."""
        with self._changed:
            for slot in self._free(role, ""):
                if unfit(slot):
                    self._dismiss(slot)

    def _of(self, role: Role, ring: str) -> list[PoolSlot]:
        return [s for s in self._slots if s.hello.role == role and s.hello.ring == ring and not s.dismissed]

    def _dismiss(self, slot: PoolSlot, *, now: bool = False) -> None:
        slot.dismissed = True
        slot.send(pb.Assignment(dismiss=pb.Dismiss(now=now)))

    def release(self, slot: PoolSlot, job_id: str) -> None:
        """Request a slot to drop its job; it is free when it answers. Its messages are ignored."""
        with self._changed:
            if slot.job_id != job_id:
                return
            slot.released = True
            if slot.assigned:
                slot.send(pb.Assignment(release=pb.Release(job_id=job_id)))
            else:
                slot.job_id = None
                self._changed.notify_all()

    def dismiss(self, slot: PoolSlot, *, now: bool = False) -> None:
        """Request a process to exit; it gets no more work. ``now``: a rank need not finish with the others."""
        with self._changed:
            self._dismiss(slot, now=now)
            slot.released = True

    def dismiss_ring(self, ring: str) -> None:
        """Dismiss the slots that rank 0 of a ring has registered."""
        with self._changed:
            for slot in self._slots:
                if slot.hello.ring == ring and not slot.dismissed:
                    self._dismiss(slot)
                    slot.released = True

    def dismiss_all(self) -> None:
        """Request every process to exit."""
        with self._changed:
            for slot in self._slots:
                self._dismiss(slot)
                slot.to_send.end()
            self._changed.notify_all()

    def slot_counts(self) -> SlotCounts:
        """Return the numbers of registered worker slots."""
        with self._changed:
            workers = self._of("worker", "")
            free = sum(s.job_id is None and not s.away for s in workers)
            return SlotCounts(len(workers), free, tuple(s.versions for s in workers))

    def registered(self, role: Role | None = None) -> list[SlotDescription]:
        """Return a description of every slot, or of those of a role, by machine and name."""
        with self._changed:
            slots = [slot for slot in self._slots if not slot.dismissed and role in (None, slot.hello.role)]
            found = [
                SlotDescription(
                    **{name: getattr(slot.hello, name) for name in _SHOWN},
                    job_id=slot.job_id or "",
                    process=slot.process if slot.job_id else "",
                    away=slot.away,
                    usage=slot.usage,
                )
                for slot in slots
            ]
        return sorted(found, key=lambda slot: (slot.host, slot.role, slot.name))

    def stacks(self, job_id: str, host: str, pid: int, limit_s: float = STACKS_S) -> str:
        """Return where the threads of a process are that a job uses.

        Raises:
            UsageError: the job has no such process in a slot.
            ServerUnreachable: it has not answered within ``limit_s``: no thread of its Python runs.
        """
        deadline = self._clock.now() + limit_s
        with self._changed:
            hellos = ((slot, slot.hello) for slot in self._slots if slot.job_id == job_id and not slot.away)
            slot = next((slot for slot, hello in hellos if (hello.host, hello.pid) == (host, pid)), None)
            if slot is None:
                raise UsageError(f"Job {job_id}: expected one of its processes that runs. Received: {pid} on {host}.")
            before = slot.answers
            slot.send(pb.Assignment(describe_stacks=pb.DescribeStacks()))
            while slot.answers == before and (left := deadline - self._clock.now()) > 0 and slot in self._slots:
                self._changed.wait(left)
            if slot.answers == before:
                raise ServerUnreachable(
                    f"{slot.process}: its process {pid} on {host} has not said within {limit_s:g} s where it is. "
                    "Code outside of Python may hold its interpreter."
                )
            return slot.stacks

    def attending(
        self, role: Role, accepts: Callable[[PoolSlot], bool] = lambda slot: True, ring: str = "", job_id: str = ""
    ) -> tuple[int, int]:
        """Return the numbers of (registered, free) slots of this role that the job can use."""
        with self._changed:
            slots = [s for s in self._of(role, ring) if accepts(s)]
            free = sum(s.job_id is None and not s.away for s in slots)
            return len(slots), max(0, min(free, self._spare(role, ring, job_id)))

    def plain_slots(self, role: Role) -> list[PoolSlot]:
        """Return the slots of this role that are no part of a ring."""
        with self._changed:
            return self._of(role, "")

    def wait(self, timeout_s: float) -> None:
        """Wait until a slot registers, leaves or becomes free, or for ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._changed.notify_all()
