"""Failover of an elastic ring's leader, the rank that is registered at this server.

For the coordinator the ring is one worker and one shard, whichever rank is the leader.
So a lost leader is no lost worker: calls to the shard wait for the next leader, which gets the last instruction again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobFailed, ServerUnreachable
from nfdt.core.program.state import State
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.moving_shards import MovingShards
from nfdt.jobserver.outcome import explained
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.launch.ring import Ring

FAILOVER_S = 60.0  # time for a new leader in addition to the ring's own time limit
FAILOVER_POLL_S = 0.5  # interval of checks for the next leader


class FailoverShardClients(MovingShards):
    """Client of an elastic ring's shard: a call that fails with one leader is repeated with the next one.

    Args:
        current: Client of the current leader's shard.
        deadline_s: Time limit for periods without a leader, in seconds.
    """

    def __init__(self, current: ShardClients, deadline_s: float) -> None:
        super().__init__(current, deadline_s, "rank of the ring")
        self._state: State | None = None  # written since the last epoch's end

    def repeat(self, *, fresh: bool) -> None:
        """Repeat writes that the last leader may not have broadcast; ``fresh``: no step of the epoch is trained yet."""
        if self.rate is not None:
            self._current.set_learning_rate(self.rate)
        if self._state is not None and fresh:
            self._current.write(self._state)

    def flush(self) -> None:
        """See :class:`ShardClients`."""
        self._state = None
        super().flush()

    def write(self, state: State) -> None:
        """See :class:`ShardClients`."""
        self._state = state
        super().write(state)


class LeaderFailover:
    """Search for the next leader of one job's ring, on a separate thread for each change.

    Args:
        ring: The ring.
        slots: Slots of the job: one shard and one worker.
        pool: All slots.
        changed: Condition of the job, held by callers of :meth:`begin` and acquired for every check.
        connect: Function that creates the client of the shard at its current address.
        deadline_s: Time limit of a failover, in seconds.
        first: Client of the first leader's shard.

    Attributes:
        shard: Client of the current leader's shard.
    """

    def __init__(
        self,
        ring: Ring,
        slots: JobSlots,
        pool: SlotPool,
        changed: threading.Condition,
        connect: Callable[[], ShardClients],
        deadline_s: float,
        *,
        first: ShardClients,
    ) -> None:
        self._ring, self._slots, self._pool, self._changed = ring, slots, pool, changed
        self._connect, self._deadline_s = connect, deadline_s
        self.shard = FailoverShardClients(first, deadline_s)
        self._under_way = False

    def begin(self, coordinator: Coordinator, fail: Callable[[BaseException], None]) -> None:
        """Find the next leader in the background; do nothing while a search is running.

        Args:
            coordinator: Coordinator of the job, informed when the ring answers again.
            fail: Function that is called with ``changed`` held when no rank takes over.
        """
        if not self._under_way:
            self._under_way = True
            threading.Thread(target=self._find_leader, args=(coordinator, fail), name="failover", daemon=True).start()

    def _find_leader(self, coordinator: Coordinator, fail: Callable[[BaseException], None]) -> None:
        try:
            while self._goes_on():
                shard, worker = self._take()
                self._start(shard, worker, coordinator)
        except Exception as error:  # the job waits for this thread
            reason = explained(self._ring, error)
            with self._changed:
                fail(reason)
            self.shard.close()

    def _goes_on(self) -> bool:
        """Return whether a position is failing over; once none is, the next loss begins another failover."""
        with self._changed:
            self._under_way = bool(self._places(failing_over=True)) and not self.shard.closed
            return self._under_way

    def _places(self, *, failing_over: bool) -> list[JobSlot]:
        return [s for s in (*self._slots.shards, *self._slots.living()) if s.failing_over or not failing_over]

    def _take(self) -> tuple[JobSlot, JobSlot]:
        """Return both positions of the next leader, once it is registered and the last one is permanently lost."""
        shard, worker = self._places(failing_over=False)
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
            return  # this leader is lost as well
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
