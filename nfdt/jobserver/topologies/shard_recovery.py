"""Restoration of the shards of one job from their newest snapshot, after the loss of one of them.

All shards go back to the same moment: an update that only some of them contain would be applied to a part of the
weights. The workers keep their processes and models; what the snapshot lacks is leased again. See decision 0039.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import NfdtError, ServerUnreachable
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.moving_shards import MovingShards
from nfdt.jobserver.outcome import PartLost
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies.context import TopologyContext
from nfdt.jobserver.topologies.slot_supply import launch_shards

DEADLINE_S = 240.0  # of a call to the shards, above the time limit for their start


class ShardRecovery:
    """Restoration of lost shards, on a separate thread for each series of losses.

    Args:
        context: Parts of the job.
        connect: Function that creates the client of the shards at their current addresses.

    Attributes:
        shards: Client of the current shards.
        possible: Whether a loss can be undone; False from the end of an epoch until its snapshot.
        running: Whether shards are being restored; guarded by ``context.changed``.
        stopped: Whether the job continues with another topology.
    """

    def __init__(self, context: TopologyContext, connect: Callable[[], ShardClients]) -> None:
        self._context, self._connect = context, connect
        self.shards = MovingShards(connect(), DEADLINE_S, "shard")
        self.possible = True
        self.running = False
        self.stopped = False

    @property
    def active(self) -> bool:
        """Whether the job runs in this topology."""
        return not (self.shards.closed or self.stopped)

    def begin(self, lost: JobSlot, how: str, coordinator: Coordinator) -> None:
        """Restore the shards in the background; ``context.changed`` is held."""
        context = self._context
        lost.failing_over, lost.address = True, ""
        context.job_log.record("shard_lost", {"shard": lost.name, "reason": how})
        if not self.possible:
            text = f"{lost.name} is lost ({how}), and the newest state of the shards could not be stored."
            context.fail(PartLost(text))
            return
        coordinator.recovery.suspend()
        if not self.running:
            self.running = True
            threading.Thread(target=self._run, args=(coordinator,), name="shard recovery", daemon=True).start()

    def _run(self, coordinator: Coordinator) -> None:
        began_at = self._context.server.clock.now()
        try:
            while self.active and not self._restore(coordinator, began_at):
                pass
        except Exception as error:  # the job waits for this thread
            reason = error if isinstance(error, NfdtError) else NfdtError(f"{type(error).__name__}: {error}")
            with self._context.changed:
                self._context.fail(PartLost(f"A lost shard could not be restored. {reason}"))
            self.shards.close()

    def _restore(self, coordinator: Coordinator, began_at: float) -> bool:
        """Start all shards from the newest snapshot; return whether none was lost meanwhile."""
        context, slots = self._context, self._context.slots
        with context.changed:
            context.wait_for(self._lacking)
            slots.restart_shards()
            context.wait_for(lambda: [s.name for s in slots.shards if not s.address and not self._lost()])
            if self._lost():
                return False
        current = self._connect()
        try:
            if (rate := self.shards.rate) is not None:
                current.set_learning_rate(rate)
        except ServerUnreachable:
            current.close()
            return False  # a shard is lost again: its end is about to be reported
        self.shards.replace(current)
        with context.changed:
            if self._lost():
                return False
            redone = coordinator.recovery.resume()
            slots.move_workers()
            self.running = False
            context.changed.notify_all()
        seconds = context.server.clock.now() - began_at
        context.job_log.record("shards_restored", {"seconds": round(seconds, 3), "redone_samples": redone})
        return True

    def _lost(self) -> list[JobSlot]:
        return [shard for shard in self._context.slots.shards if shard.failing_over]

    def _lacking(self) -> list[str]:
        """Give the positions of lost shards to free slots; return the names of those that have none yet."""
        lost = self._lost()
        if lost:
            launch_shards(self._context.server, len(self._context.slots.shards))
        return [f"a slot for {shard.name}" for shard in lost if not self._context.slots.replace_shard(shard)]
