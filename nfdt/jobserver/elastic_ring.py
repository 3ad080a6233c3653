"""A ring in worker slots that outlives the loss of ranks: what is left of it, and when it forms another world."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Literal

from nfdt.core.specs.horovod_options import MOST_COOLDOWN_S
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.outcome import SlotError
from nfdt.jobserver.pool_slot import PoolSlot, SlotMessageKind
from nfdt.jobserver.slot_ring import FORM_S, SlotRing

LOOK_S = 0.5  # interval of checks for slots that may become ranks

WorldChange = Literal["lost", "grow"]


class ElasticSlotRing(SlotRing):
    """Ring that goes on in another world when ranks are lost, or more may join. Thread-safe.

    A world ends with the first of its ranks that is lost, or that has lost the others. All others leave it, and report
    that; then the survivors and free slots are the ranks of the next world.

    Attributes:
        changes: Number of changes of the ranks.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._lost: dict[PoolSlot, str] = {}
        self._left: set[PoolSlot] = set()
        self._losses = 0
        self._grows_at = 0.0
        self.changes = 0

    @property
    def present(self) -> list[PoolSlot]:
        """Slots of the last world's ranks that are not lost, by rank."""
        with self._changed:
            return [slot for slot in self.slots if slot not in self._lost]

    @property
    def lost(self) -> dict[PoolSlot, str]:
        """Slots that were lost, each with the reason, without those that :meth:`forget` was called for."""
        with self._changed:
            return dict(self._lost)

    @property
    def lacks(self) -> int:
        """Number of ranks that may still join."""
        return (self.shape.elastic.max_workers or self.shape.size) - len(self.present)

    @property
    def may_grow(self) -> bool:
        """Whether a rank may join now: not at once after a loss, as another one might follow."""
        return self.lacks > 0 and time.monotonic() >= self._grows_at

    def forget(self, slots: Collection[PoolSlot]) -> None:
        """Drop the records of lost slots that are no ranks any more."""
        with self._changed:
            self._lost = {slot: how for slot, how in self._lost.items() if slot not in slots}

    def receive(self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None) -> None:
        """Process a message of a rank; a :data:`~nfdt.jobserver.pool_slot.SlotListener`."""
        if kind == "ready" and message is not None and message.ready.left:
            self._record(self._left.add, slot)
        elif kind in ("ready", "output", "spans"):
            super().receive(slot, kind, message)
        elif kind == "failed" and message is not None and not SlotError("the ring", message.failed).lost_connection:
            super().receive(slot, kind, message)
        else:  # on a thread of gRPC, which must not wait for the process to end
            reason = message.failed.message if kind == "failed" and message is not None else ""
            arguments = slot, reason
            threading.Thread(target=self._lose_rank, args=arguments, name=f"end of {slot.name}", daemon=True).start()

    def _lose_rank(self, slot: PoolSlot, reason: str) -> None:
        how = reason or slot.silence or self._end_of(slot.hello)
        self._record(lambda lost: self._lost.setdefault(lost, how), slot)

    def _record(self, add: Callable[[PoolSlot], object], slot: PoolSlot) -> None:
        with self._changed:
            add(slot)
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._ended or self._cause is not None

    def _is_lost(self) -> bool:
        return any(slot in self._lost for slot in self.slots)

    def _all_left(self) -> bool:
        return all(slot in self._left or slot in self._lost for slot in self.slots)

    def begin_world(self) -> None:
        """Forget who has left the last world; its ranks are about to be assigned to the next one."""
        with self._changed:
            self._joined.clear()
            self._left.clear()
            self.changes += 1

    def await_ranks(self) -> None:
        """Wait until all ranks have joined, or one of them is lost or has left; those that take too long are lost."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over or self._is_lost() or self._left or len(self._joined) == len(self.slots), FORM_S
            )
            if self._over or self._is_lost() or self._left:
                return
            for rank, slot in enumerate(self.slots):
                if rank not in self._joined:
                    self._lost[slot] = f"it did not join within {FORM_S:.0f} s"

    def await_change(self, has_more: Callable[[], bool]) -> WorldChange | None:
        """Wait until the world has lost a rank, or another one may join; return None when the ring has ended.

        Args:
            has_more: Returns whether there is a slot for one more rank.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._is_lost() or self._left, LOOK_S)
                if self._over:
                    return None
                if self._is_lost() or self._left:
                    return "lost"
            if self.may_grow and has_more():
                return "grow"

    def dissolve(self, change: WorldChange) -> None:
        """Let the ranks leave their world, at the next commit or because of a loss, and wait until they have."""
        self._ask_to_leave(at_commit=change == "grow")
        if change == "grow":
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._is_lost() or self._all_left())
                change = "lost" if self._is_lost() else "grow"
            if change == "lost":
                self._ask_to_leave(at_commit=False)
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._all_left(), FORM_S)
            for slot in self.slots:
                if slot not in self._left:
                    self._lost.setdefault(slot, f"it did not leave its world within {FORM_S:.0f} s")
            if change == "lost":
                pause_s = min(self.shape.elastic.host_cooldown_s * 2**self._losses, MOST_COOLDOWN_S)
                self._losses += 1
                self._grows_at = time.monotonic() + pause_s

    def _ask_to_leave(self, *, at_commit: bool) -> None:
        with self._changed:
            remaining = [slot for slot in self.slots if slot not in self._lost and slot not in self._left]
        for slot in remaining:
            leave = pb.LeaveWorld(job_id=slot.job_id or "", at_commit=at_commit)
            slot.send(pb.Assignment(leave_world=leave))
