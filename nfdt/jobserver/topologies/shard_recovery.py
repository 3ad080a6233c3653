"""Snapshots of the shards of one job, and their restoration from the newest one after the loss of a shard.

All shards go back to the same moment: an update that only some of them contain would be applied to a part of the
weights. The workers keep their processes and models; what the snapshot lacks is leased again. See decision 0039.
A job whose server is lost goes on from the newest snapshot, too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.failover import Resume
from nfdt.core.arrays.safetensors_io import dump_parts
from nfdt.core.errors import NfdtError, NotStored, ServerUnreachable
from nfdt.jobserver.job_slot import JobSlot, ShardState
from nfdt.jobserver.moving_shards import MovingShards
from nfdt.jobserver.outcome import PartLost
from nfdt.jobserver.shard_clients import ShardClients, ShardSnapshot
from nfdt.jobserver.topologies.context import TopologyContext
from nfdt.jobserver.topologies.failover import Failover
from nfdt.jobserver.topologies.slot_supply import launch_shards
from nfdt.model.program.state import dump_state_parts

_log = logging.getLogger(__name__)

DEADLINE_S = 240.0  # of a call to the shards, above the time limit for their start
POLL_S = 1.0


class ShardRecovery(Failover):
    """Carrier of the coordinator's :class:`~nfdt.coordinator.recovery.Recovery`: snapshots and lost shards of one job.

    A snapshot is taken when one is due, on a thread of its own, and whenever :meth:`take` is called. It is on the disk
    before the coordinator relies on it.

    Args:
        context: Parts of the job.
        coordinator: Coordinator of the job.
        connect: Function that creates the client of the shards at their current addresses.

    Attributes:
        shards: Client of the current shards.
    """

    def __init__(self, context: TopologyContext, coordinator: Coordinator, connect: Callable[[], ShardClients]) -> None:
        super().__init__(context, coordinator, connect)
        self._machine = self._recovery = coordinator.recovery
        self.shards = MovingShards(connect(), DEADLINE_S, "shard")
        self._replaced: set[str] = set()  # artifacts of earlier snapshots
        threading.Thread(target=self._take_due, name=f"snapshots of {context.job_id}", daemon=True).start()

    # ---- losses

    def lose(self, lost: JobSlot, how: str) -> None:
        """Restore the shards in the background; locked."""
        self._context.job_log.record("shard_lost", {"shard": lost.name, "reason": how})
        super().lose(lost, how)

    def _missing(self) -> Sequence[str]:
        shards = self._slots.shards
        if self._recovery.stage == "starting":
            return [shard.name for shard in shards if not shard.address]
        lost = [shard for shard in shards if shard.failing_over]
        if lost:
            launch_shards(self._context.server, len(shards))
        return [f"a slot for {shard.name}" for shard in lost if not self._slots.replace_shard(shard)]

    def _start(self, attempt: int) -> None:
        self._slots.restart_shards(attempt)

    def _resume(self, resume: Resume) -> None:
        self._slots.move_workers()
        data = {"seconds": round(resume.seconds, 3), "redone_samples": resume.redone_samples}
        self._context.job_log.record("shards_restored", data)

    def _reason(self, error: Exception) -> BaseException:
        reason = error if isinstance(error, NfdtError) else NfdtError(f"{type(error).__name__}: {error}")
        return PartLost(f"A lost shard could not be restored. {reason}")

    # ---- snapshots

    def _take_due(self) -> None:
        while self._await_due():
            try:
                self.take()
            except NfdtError as error:
                _log.warning("job %s: no snapshot of the shards: %s", self._context.job_id, error)

    def _await_due(self) -> bool:
        """Wait until a snapshot is due; return False once no more are needed."""
        with self._changed:
            while self._recovery.stage != "closed":
                if self._recovery.is_due:
                    return True
                left_s = self._recovery.due_at - self._context.server.clock.now()
                self._changed.wait(min(left_s, POLL_S) if left_s > 0 else POLL_S)
        return False

    def renew(self, incarnation: int) -> bool:
        """Store a state that no task leads to: the end of an epoch, or what a client has written.

        If it cannot be stored, the loss of a shard cannot be undone until the next snapshot.

        Returns:
            Whether the shards still have this number of restorations, and so that state.
        """
        while self._are_current(incarnation):
            try:
                if self.take(exact=True):
                    return True
            except ServerUnreachable:
                self.shards.flush()  # waits for the successors of lost shards
            except NfdtError as error:
                _log.warning("job %s: the state of the shards could not be stored: %s", self._context.job_id, error)
                with self._changed:
                    self._recovery.unstorable(incarnation)
                break
        return self._recovery.attempt == incarnation

    def _are_current(self, incarnation: int) -> bool:
        """Wait while shards are being restored; return whether they have this number of restorations."""
        with self._changed:
            while self.running:
                self._changed.wait(POLL_S)
            return self._recovery.serves(incarnation)

    def take(self, *, exact: bool = False) -> bool:
        """Store the state of all shards; return False if shards are being restored, or the job ends.

        ``exact``: no push is on its way.

        Raises:
            NfdtError: A shard does not answer, or the state cannot be stored.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._recovery.taking)
            if not self._recovery.begin_snapshot():
                return False
        recorded = False
        try:
            recorded = self._await_quiet() and self._store(self.shards.snapshot(self._go_on), exact)
        finally:
            with self._changed:
                self._recovery.end_snapshot(recorded=recorded)
                self._changed.notify_all()
        return recorded

    def _await_quiet(self) -> bool:
        """Wait until no round is open; return False if shards are being restored, or the job ends."""
        with self._changed:
            while (step := self._recovery.snapshot_step()) == "wait":
                self._changed.wait(POLL_S)
        return step == "copy"

    def _go_on(self) -> None:
        with self._changed:
            self._recovery.go_on()
            self._changed.notify_all()

    def _store(self, snapshot: ShardSnapshot, exact: bool) -> bool:
        """Write a snapshot to the disk; return False if no shard has that state any more."""
        context, artifacts, state = self._context, self._context.server.artifacts, snapshot.state
        untrained = dict(enumerate(self._coordinator.merger.current))
        parts = dump_state_parts(state.weights, state.optimizer, untrained)
        stored = ShardState(artifacts.put(*parts), artifacts.put(*dump_parts(dict(snapshot.records))))
        with self._changed:
            if not self._recovery.adopt(snapshot.tasks, exact=exact):
                self._delete(stored.artifacts)
                return False
            self._replaced |= self._slots.shard_state.artifacts
            self._slots.shard_state = stored
            context.fetchable.update(stored.artifacts)
            progress = self._recovery.progress()
        context.job_log.snapshot(stored.state, progress, stored.records)
        self._delete(self._replaced)
        self._replaced = set()
        return True

    def forget(self) -> None:
        """Delete the newest snapshot, because the job has its result; leave it to the server's quota if that fails."""
        with self._changed, contextlib.suppress(NotStored):
            self._changed.wait_for(lambda: not self._recovery.taking)
            self._context.job_log.snapshot("", None, "")
            last, self._slots.shard_state = self._slots.shard_state, ShardState()
            self._delete(last.artifacts | self._replaced)

    def _delete(self, artifacts: set[str]) -> None:
        """Delete files of snapshots that are part of nothing else."""
        context = self._context
        for name in artifacts - self._slots.shard_state.artifacts - context.job_log.needed():
            context.fetchable.discard(name)
            context.server.artifacts.delete(name)
