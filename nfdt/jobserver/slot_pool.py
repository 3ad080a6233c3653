"""The slot processes that attend a job server: who is there, who is free, who works for which job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from nfdt.core.errors import ProtocolError
from nfdt.core.jobs.launcher import Role
from nfdt.core.jobs.runner import SlotCounts
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.numbered import NumberedOutbox

_log = logging.getLogger(__name__)

MAX_SLOTS = 8192
MAX_NAME = 200
MOST_PATIENCE_S = 3600.0
RETURN_POLL_S = 0.1

SlotMessageKind = Literal["ready", "finished", "failed", "lost"]
SlotListener = Callable[["PoolSlot", SlotMessageKind, "pb.SlotMessage | None"], None]


@dataclass(eq=False)
class PoolSlot:
    """One attending process. Only the :class:`SlotPool` changes it.

    Attributes:
        job_id: The job it works for; None: it is free.
        told: Whether it knows of that job; who does not is not asked to drop it.
        session: The client session whose code it has run; "" for none: it can serve anybody.
        outbox: Assignments on their way to the process.
        stream: Which of its streams is the current one.
        away: That one broke, and the process may still come back.
        received: The number of its last message.
    """

    hello: pb.SlotHello
    job_id: str | None = None
    told: bool = False
    session: str = ""
    dismissed: bool = False
    listener: SlotListener | None = None
    outbox: NumberedOutbox[pb.Assignment] = field(default_factory=NumberedOutbox)
    stream: int = 0
    away: bool = False
    received: int = 0

    @property
    def name(self) -> str:
        """The name the process gave."""
        return self.hello.name

    @property
    def versions(self) -> Mapping[str, str]:
        """Python, Keras and TensorFlow of the process."""
        return dict(self.hello.versions)

    def send(self, assignment: pb.Assignment) -> None:
        """Pass an assignment to the process."""
        self.told = self.told or assignment.WhichOneof("assignment") in ("shard", "worker")
        assignment.received = self.received
        self.outbox.put(assignment)


@dataclass(frozen=True)
class Joined:
    """A slot, the number of the stream that it has now, and whether it had one before."""

    slot: PoolSlot
    stream: int
    resumed: bool


class SlotPool:
    """All attending slots; any thread may call.

    Args:
        lives: Whether the process of a slot may still run, as far as this machine knows.
    """

    def __init__(self, lives: Callable[[pb.SlotHello], bool] = lambda hello: True) -> None:
        self._lives = lives
        self._changed = threading.Condition()
        self._slots: list[PoolSlot] = []

    def join(self, hello: pb.SlotHello, received: int = 0) -> Joined:
        """A process says hello, or takes its stream up after this assignment.

        Raises:
            ProtocolError: an unknown role, no name, or too many slots.
        """
        if hello.role not in ("worker", "shard") or not 0 < len(hello.name) <= MAX_NAME:
            raise ProtocolError(f"Slot: expected a name and the role worker or shard. Received: {hello.role!r}.")
        with self._changed:
            found = next((slot for slot in self._slots if hello.key and slot.hello.key == hello.key), None)
            if found is None and len(self._slots) >= MAX_SLOTS:
                raise ProtocolError(f"Slots: expected at most {MAX_SLOTS}.")
            slot = found or PoolSlot(hello)
            if found is None:
                self._slots.append(slot)
            slot.outbox.arrived(received)
            slot.stream, slot.away = slot.outbox.open(), False
            self._changed.notify_all()
            _log.info("%s slot %s attends%s", hello.role, hello.name, " again" if found else "")
            return Joined(slot, slot.stream, found is not None)

    def broke(self, slot: PoolSlot, stream: int) -> None:
        """A stream broke: a process that can take it up gets no more work until it does, any other one is gone."""
        if not slot.hello.key:
            self.leave(slot)
            return
        with self._changed:
            if slot.stream == stream:
                slot.away = True
                slot.outbox.open()  # ends the broken one
                self._changed.notify_all()

    def await_return(self, slot: PoolSlot, stream: int) -> None:
        """Wait until the process takes its stream up, is known to be gone, or is not patient any more."""
        deadline = time.monotonic() + min(slot.hello.patience_s, MOST_PATIENCE_S)
        with self._changed:
            while slot in self._slots and slot.stream == stream:
                left = deadline - time.monotonic()
                if left <= 0 or slot.dismissed or not self._lives(slot.hello):
                    return
                self._changed.wait(min(left, RETURN_POLL_S))

    def ended(self, name: str) -> None:
        """Who started the slots of this name says that they have ended."""
        with self._changed:
            slots = [slot for slot in self._slots if slot.name == name]
        for slot in slots:
            self.leave(slot)

    def leave(self, slot: PoolSlot, stream: int | None = None) -> None:
        """The process is gone, unless it has another stream than this one by now; its job is told."""
        with self._changed:
            if slot not in self._slots or stream not in (None, slot.stream):
                return
            self._slots.remove(slot)
            slot.outbox.end()
            listener, slot.listener, slot.dismissed = slot.listener, None, True
            self._changed.notify_all()
        _log.info("%s slot %s is gone", slot.hello.role, slot.name)
        if listener is not None:
            listener(slot, "lost", None)

    def receive(self, slot: PoolSlot, message: pb.SlotMessage) -> None:
        """A message of the process; one that came before, or about another job than its own, is dropped."""
        kind = message.WhichOneof("message")
        with self._changed:
            slot.outbox.arrived(message.received)
            if slot.received < message.number:
                slot.received = message.number
            elif message.number:
                return
        if kind == "leaving":
            self.leave(slot)
            return
        if kind not in ("ready", "finished", "failed"):
            raise ProtocolError(f"Slot {slot.name}: expected ready, finished or failed. Received: {kind}.")
        with self._changed:
            if getattr(message, kind).job_id != slot.job_id:
                return
            listener = slot.listener
            if kind != "ready":
                slot.job_id, slot.listener = None, None
                self._changed.notify_all()
        if listener is not None:
            listener(slot, kind, message)

    def take(
        self,
        role: Role,
        count: int,
        job_id: str,
        listener: SlotListener,
        *,
        session: str = "",
        code: bool = False,
        accepts: Callable[[PoolSlot], bool] = lambda slot: True,
        ring: str = "",
    ) -> list[PoolSlot]:
        """Up to ``count`` free slots become the job's.

        Args:
            role: Which kind.
            count: How many at most.
            job_id: The job they will work for.
            listener: Told what they say, and when they are lost; called without any lock held.
            session: The job's client session: a slot that has run code of one session never serves another.
            code: Whether the job carries code.
            accepts: Whether the job can use a slot.
            ring: The allreduce ring whose slots are wanted; "" for slots of none.
        """
        with self._changed:
            if count > 0:
                self.evict_other_sessions(role, session, ring)
            free = [s for s in self._of(role, ring) if s.job_id is None and not s.away]
            fit = [s for s in free if accepts(s)][: max(count, 0)]
            for slot in fit:
                slot.job_id, slot.listener, slot.told = job_id, listener, False
                slot.session = session if code else slot.session
            return fit

    def evict_other_sessions(self, role: Role, session: str, ring: str = "") -> None:
        """End the free slots that have run code of another session than this one: they can serve no job of it."""
        with self._changed:
            for slot in self._of(role, ring):
                if slot.job_id is None and slot.session not in ("", session):
                    self._dismiss(slot)

    def _of(self, role: Role, ring: str) -> list[PoolSlot]:
        return [s for s in self._slots if s.hello.role == role and s.hello.ring == ring and not s.dismissed]

    def _dismiss(self, slot: PoolSlot) -> None:
        slot.dismissed = True
        slot.send(pb.Assignment(dismiss=pb.Dismiss()))

    def release(self, slot: PoolSlot, job_id: str) -> None:
        """The job is over for this slot, which answers when it is free; news of it go nowhere."""
        with self._changed:
            if slot.job_id != job_id:
                return
            slot.listener = None
            if slot.told:
                slot.send(pb.Assignment(release=pb.Release(job_id=job_id)))
            else:
                slot.job_id = None
                self._changed.notify_all()

    def dismiss(self, slot: PoolSlot) -> None:
        """Ask a process to exit; it gets no more work."""
        with self._changed:
            self._dismiss(slot)
            slot.listener = None

    def dismiss_all(self) -> None:
        """Ask every process to exit."""
        with self._changed:
            for slot in self._slots:
                self._dismiss(slot)
                slot.outbox.end()
            self._changed.notify_all()

    def slot_counts(self) -> SlotCounts:
        """The worker slots that attend."""
        with self._changed:
            workers = self._of("worker", "")
            free = sum(s.job_id is None and not s.away for s in workers)
            return SlotCounts(len(workers), free, tuple(s.versions for s in workers))

    def attending(
        self, role: Role, accepts: Callable[[PoolSlot], bool] = lambda slot: True, ring: str = ""
    ) -> tuple[int, int]:
        """(attending, free) slots of this role that the job can use."""
        with self._changed:
            slots = [s for s in self._of(role, ring) if accepts(s)]
            return len(slots), sum(s.job_id is None and not s.away for s in slots)

    def wait(self, timeout_s: float) -> None:
        """Return when a slot came, went or became free, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait(timeout_s)

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()
