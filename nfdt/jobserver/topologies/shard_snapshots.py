"""Snapshots of the shards of one job, from which it goes on after the loss of a shard or of the server."""

from __future__ import annotations

import contextlib
import logging
import threading

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.arrays.safetensors_io import dump_parts
from nfdt.core.errors import NfdtError, NotStored, ServerUnreachable
from nfdt.core.program.state import dump_state_parts
from nfdt.jobserver.job_slot import ShardState
from nfdt.jobserver.shard_clients import ShardSnapshot
from nfdt.jobserver.topologies.context import TopologyContext
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery

_log = logging.getLogger(__name__)

COST_SHARE = 0.02  # largest part of the time that snapshots may take
POLL_S = 1.0
QUIET_S = 60.0  # limit of the wait for the end of a round


class ShardSnapshots:
    """Snapshots of one job: every ``interval_s`` seconds on a thread of their own, and whenever :meth:`take` is called.

    A snapshot is on the disk before the coordinator relies on it.

    Args:
        context: Parts of the job.
        coordinator: Coordinator of the job.
        recovery: Restoration of the shards, which starts from the newest snapshot.
        fetchable: Names of the artifacts that the job's slots may fetch.
        interval_s: Time between the beginnings of two snapshots; longer if a snapshot takes a large part of it.
    """

    def __init__(
        self,
        context: TopologyContext,
        coordinator: Coordinator,
        recovery: ShardRecovery,
        fetchable: set[str],
        interval_s: float,
    ) -> None:
        self._context, self._coordinator, self._recovery = context, coordinator, recovery
        self._fetchable, self._interval_s = fetchable, interval_s
        self._clock = context.server.clock
        self._taking = threading.Lock()
        self._due_at = self._clock.now() + interval_s
        self._replaced: set[str] = set()  # artifacts of earlier snapshots
        threading.Thread(target=self._run, name=f"snapshots of {context.job_id}", daemon=True).start()

    def _run(self) -> None:
        while self._await_due():
            try:
                self.take()
            except NfdtError as error:
                _log.warning("job %s: no snapshot of the shards: %s", self._context.job_id, error)

    def _await_due(self) -> bool:
        """Wait until a snapshot is due in the middle of an epoch; return False once no more are needed."""
        with self._context.changed:
            while self._recovery.active:
                left_s = self._due_at - self._clock.now()
                if left_s <= 0 and self._coordinator.phase == "train" and not self._recovery.running:
                    return True
                self._context.changed.wait(min(left_s, POLL_S) if left_s > 0 else POLL_S)
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
                self._recovery.shards.flush()  # waits for the successors of lost shards
            except NfdtError as error:
                _log.warning("job %s: the state of the shards could not be stored: %s", self._context.job_id, error)
                with self._context.changed:
                    self._recovery.possible = False
                return True
        return False

    def _are_current(self, incarnation: int) -> bool:
        """Wait while shards are being restored; return whether they have this number of restorations."""
        with self._context.changed:
            while self._recovery.running and self._recovery.active:
                self._context.changed.wait(POLL_S)
            return self._recovery.active and self._context.slots.incarnation == incarnation

    def take(self, *, exact: bool = False) -> bool:
        """Store the state of all shards; return False if shards are being restored, or the job ends.

        ``exact``: no push is on its way.

        Raises:
            NfdtError: A shard does not answer, or the state cannot be stored.
        """
        with self._taking:
            began_at = self._clock.now()
            try:
                return self._take(exact)
            finally:
                now = self._clock.now()
                self._due_at = max(began_at + self._interval_s, now + (now - began_at) / COST_SHARE)

    def _take(self, exact: bool) -> bool:
        context, slots = self._context, self._context.slots
        with context.changed:
            incarnation = slots.incarnation
            if not self._await_quiet():
                return False
        try:
            snapshot = self._recovery.shards.snapshot(self._go_on)
        finally:
            self._go_on()
        stored = self._store(snapshot)
        with context.changed:
            if not self._recovery.active or self._recovery.running or slots.incarnation != incarnation:
                self._delete(stored.artifacts)
                return False
            self._replaced |= slots.shard_state.artifacts
            slots.shard_state = stored
            self._fetchable.update(stored.artifacts)
            self._coordinator.recovery.settle(snapshot.tasks, exact=exact)
            self._recovery.possible = True
            progress = self._coordinator.recovery.progress()
        context.job_log.snapshot(stored.state, progress, stored.records)
        self._delete(self._replaced)
        self._replaced = set()
        return True

    def forget(self) -> None:
        """Delete the newest snapshot, because the job has its result; leave it to the server's quota if that fails."""
        with self._taking, self._context.changed, contextlib.suppress(NotStored):
            self._context.job_log.snapshot("", None, "")
            last, self._context.slots.shard_state = self._context.slots.shard_state, ShardState()
            self._delete(last.artifacts | self._replaced)

    def _await_quiet(self) -> bool:
        """Wait until no round is open; return False if shards are being restored, or the job ends."""
        deadline = self._clock.now() + QUIET_S
        self._coordinator.recovery.quiesce()
        while self._recovery.active and not self._recovery.running and self._clock.now() < deadline:
            if self._coordinator.recovery.is_quiet:
                return True
            self._context.changed.wait(POLL_S)
        self._go_on()
        return False

    def _go_on(self) -> None:
        with self._context.changed:
            self._coordinator.recovery.go_on()
            self._context.changed.notify_all()

    def _store(self, snapshot: ShardSnapshot) -> ShardState:
        artifacts, state = self._context.server.artifacts, snapshot.state
        untrained = dict(enumerate(self._coordinator.merger.current))
        parts = dump_state_parts(state.weights, state.optimizer, untrained)
        return ShardState(artifacts.put(*parts), artifacts.put(*dump_parts(dict(snapshot.records))))

    def _delete(self, artifacts: set[str]) -> None:
        """Delete files of snapshots that are part of nothing else."""
        context = self._context
        for name in artifacts - context.slots.shard_state.artifacts - context.job_log.needed():
            self._fetchable.discard(name)
            context.server.artifacts.delete(name)
