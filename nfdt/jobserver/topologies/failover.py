"""Another rank of an elastic ring takes over from the one that attended this server.

To the coordinator the ring is one worker and one shard; who speaks for it is none of its business. So a lost speaker is
no lost worker: calls to the shard wait, the worker is told again what it was told, and the next speaker answers both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.core.program.state import State
from nfdt.jobserver.job_slots import JobSlot, JobSlots
from nfdt.jobserver.outcome import explained
from nfdt.jobserver.shard_clients import ShardControl
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.launch.horovod import Ring

Answer = TypeVar("Answer")

FAILOVER_S = 60.0  # what a new speaker may take in addition to the ring's own time limit
FAILOVER_POLL_S = 0.5


class RingShard(ShardControl):
    """The shard of an elastic ring: a call that its end interrupts is made again to the next one.

    Args:
        current: The control of the one that serves now.
        deadline_s: How long there may be none.

    Attributes:
        closed: The job has ended.
    """

    def __init__(self, current: ShardControl, deadline_s: float) -> None:
        self._current, self._deadline_s = current, deadline_s
        self._retired: list[ShardControl] = []
        self._changed = threading.Condition()
        self._rate: float | None = None
        self._state: State | None = None  # written since the last epoch's end
        self.closed = False

    def replace(self, current: ShardControl) -> None:
        """Another rank serves from now on."""
        with self._changed:
            self._retired.append(self._current)
            self._current = current
            self._changed.notify_all()

    def close(self) -> None:
        """Calls under way fail, and nobody is waited for."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        for control in (*self._retired, self._current):
            control.close()

    def _ask(self, call: Callable[[ShardControl], Answer]) -> Answer:
        tried: ShardControl | None = None
        while True:
            current = self._wait_for_other_than(tried)
            try:
                return call(current)
            except ServerUnreachable:
                tried = current

    def _wait_for_other_than(self, tried: ShardControl | None) -> ShardControl:
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._current not in (None, tried), self._deadline_s)
            if self.closed or self._current is None or self._current is tried:
                raise ServerUnreachable(f"No rank of the ring answers (time limit: {self._deadline_s:.0f} s).")
            return self._current

    def repeat(self, *, fresh: bool) -> None:
        """Tell the rank that serves now what the last one may not have passed on; ``fresh``: nothing is trained yet."""
        if self._rate is not None:
            self._current.set_learning_rate(self._rate)
        if self._state is not None and fresh:
            self._current.write(self._state)

    def flush(self) -> None:
        """As of one shard."""
        self._state = None
        self._ask(lambda shard: shard.flush())

    def set_learning_rate(self, value: float) -> None:
        """As of one shard."""
        self._rate = value
        self._ask(lambda shard: shard.set_learning_rate(value))

    def forget(self, worker: str) -> None:
        """As of one shard."""
        self._ask(lambda shard: shard.forget(worker))

    def statistics(self) -> list[Any]:
        """As of one shard."""
        return self._ask(lambda shard: list(shard.statistics()))

    def read(self) -> State:
        """As of one shard."""
        return self._ask(lambda shard: shard.read())

    def write(self, state: State) -> None:
        """As of one shard."""
        self._state = state
        self._ask(lambda shard: shard.write(state))


class LeaderFailover:
    """Finds the next speaker of one job's ring, on a thread of its own for each change.

    Args:
        ring: The ring.
        slots: The job's slots; one shard and one worker.
        pool: All slots.
        changed: The job's condition, held by callers and taken for every look.
        connect: Makes the control of the shard at the address that the slots has.
        deadline_s: How long it may take.
        first: The control of the shard that serves now.
    """

    def __init__(
        self,
        ring: Ring,
        slots: JobSlots,
        pool: SlotPool,
        changed: threading.Condition,
        connect: Callable[[], ShardControl],
        deadline_s: float,
        *,
        first: ShardControl,
    ) -> None:
        self._ring, self._slots, self._pool, self._changed = ring, slots, pool, changed
        self._connect, self._deadline_s = connect, deadline_s
        self.shard = RingShard(first, deadline_s)
        self._under_way = False

    def begin(self, coordinator: Coordinator, fail: Callable[[BaseException], None]) -> None:
        """A job_slot has become failing_over: fill it in the background.

        Args:
            coordinator: Told when the ring answers again.
            fail: Told, under the lock, when nobody takes over.
        """
        if not self._under_way:
            self._under_way = True
            threading.Thread(target=self._fill, args=(coordinator, fail), name="failover", daemon=True).start()

    def _fill(self, coordinator: Coordinator, fail: Callable[[BaseException], None]) -> None:
        try:
            while self._goes_on():
                shard, worker = self._take()
                self._start(shard, worker, coordinator)
        except Exception as error:  # whatever it was: the job waits for this thread
            reason = explained(self._ring, error)
            with self._changed:
                fail(reason)
            self.shard.close()

    def _goes_on(self) -> bool:
        """Whether a job_slot is failing_over; once none is, the next lost_leader begins another failover."""
        with self._changed:
            self._under_way = bool(self._leaders(failing_over=True)) and not self.shard.closed
            return self._under_way

    def _leaders(self, *, failing_over: bool) -> list[JobSlot]:
        return [s for s in (*self._slots.shards, *self._slots.living()) if s.failing_over or not failing_over]

    def _take(self) -> tuple[JobSlot, JobSlot]:
        """Both job_slots of the next speaker, once it attends and the last one is gone for good."""
        shard, worker = self._leaders(failing_over=False)
        self._await(lambda: shard.failing_over and worker.failing_over and self._slots.take_over(shard, worker))
        return shard, worker

    def _start(self, shard: JobSlot, worker: JobSlot, coordinator: Coordinator) -> None:
        with self._changed:
            if self.shard.closed:
                return
            self._slots.start_shard(shard)
        self._await(lambda: bool(shard.address) or shard.failing_over)
        if shard.failing_over or self.shard.closed:
            return
        self.shard.replace(self._connect())
        with self._changed:
            fresh = coordinator.fresh
        try:
            self.shard.repeat(fresh=fresh)
        except ServerUnreachable:
            return  # this one is gone, too
        with self._changed:
            self._slots.start_worker(worker, 1)
            coordinator.resumed(worker.name, dict(worker.details))
            self._changed.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._deadline_s
        while True:
            with self._changed:
                if self.shard.closed or condition():
                    return
            if failure := self._ring.failure:
                raise JobFailed(failure)
            if time.monotonic() >= deadline:
                raise JobFailed(
                    f"The rank that spoke for the ring is gone. Expected: another one within {self._deadline_s:.0f} s. "
                    f"Received: none; see {self._ring.log}. Submit the job again."
                )
            self._pool.wait(FAILOVER_POLL_S)
