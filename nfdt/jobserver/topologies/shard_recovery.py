"""Snapshots of the shards of one job, and their restoration from the newest one after the loss of a shard.

All shards go back to the same moment: an update that only some of them contain would be applied to a part of the
weights. The workers keep their processes and models; what the snapshot lacks is leased again. See decision 0039.
A job whose server is lost goes on from the newest snapshot, too.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Sequence

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.failover import Resume
from nfdt.coordinator.recovery import QUIET_S
from nfdt.core.errors import JobFailed, NfdtError, NotStored, ServerUnreachable
from nfdt.core.specs.job import EpochProgress
from nfdt.jobserver.capacity import describe_need, model_bytes
from nfdt.jobserver.incoming_state import Rest
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot, ShardState
from nfdt.jobserver.outcome import PartLost
from nfdt.jobserver.shard_clients import STATE_TIMEOUT_S, ShardSnapshot
from nfdt.jobserver.topologies.failover import Failover, MovingShards
from nfdt.jobserver.topologies.slot_supply import launch_shards

_log = logging.getLogger(__name__)

DEADLINE_S = 240.0  # of a call to the shards, above the time limit for their start
SNAPSHOT_S = QUIET_S + STATE_TIMEOUT_S  # limit of the wait for another snapshot
POLL_S = 1.0


class ShardRecovery(Failover):
    """Carrier of the coordinator's :class:`~nfdt.coordinator.recovery.Recovery`: snapshots and lost shards of one job.

    A snapshot is stored when one is due, on a thread of its own, and whenever :meth:`store_snapshot` is called.
    The coordinator relies on it only once it is on the disk.

    Args:
        parts: Parts of the job.
        coordinator: Coordinator of the job.

    Attributes:
        shards: Client of the current shards.
        rolled_back: Whether an epoch that had begun ahead was dropped because something had changed before it.
    """

    def __init__(self, parts: JobParts, coordinator: Coordinator) -> None:
        super().__init__(parts, coordinator)
        self._machine = self._recovery = coordinator.recovery
        self.shards = MovingShards(parts.connect_shards(), DEADLINE_S, "shard")
        self._replaced: set[str] = set()  # artifacts of earlier snapshots
        self._due = False  # whether a snapshot is about to be taken because it is due
        self._present: Rest | None = None  # of the newest snapshot, until an epoch begins after it
        self.rolled_back = self._rolls_back = False
        self._mailbox.add_timer(self._look_at_clock)

    # ---- losses

    def lose(self, lost: JobSlot, how: str, *, killed: bool = False) -> None:
        """Restore the shards, unless they are killed again and again."""
        self._parts.job_log.record("shard_lost", {"shard": lost.name, "reason": how})
        self._rolls_back = False
        super().lose(lost, how, killed=killed)

    def _out_of_memory(self, reason: str) -> JobFailed:
        parts, server = self._parts, self._parts.server
        model = model_bytes(self._slots.spec, parts.manifest, server.artifacts)
        return JobFailed(f"{reason} {describe_need(self._slots.spec, model, server.capacity())}")

    def _missing(self) -> Sequence[str]:
        shards = self._slots.shards
        if self._recovery.stage == "starting":
            return [shard.name for shard in shards if not shard.address]
        lost = [shard for shard in shards if shard.failing_over]
        if lost:
            launch_shards(self._parts.server, len(shards))
        return [f"a slot for {shard.name}" for shard in lost if not self._slots.replace_shard(shard)]

    def _start(self, attempt: int) -> None:
        self._slots.restart_shards(attempt)

    def _resume(self, resume: Resume) -> None:
        self._slots.move_workers()
        if self._rolls_back:
            self._rolls_back = False
            return
        data = {"seconds": round(resume.seconds, 3), "redone_samples": resume.redone_samples}
        self._parts.job_log.record("shards_restored", data)

    def _reason(self, error: Exception) -> BaseException:
        reason = error if isinstance(error, NfdtError) else NfdtError(f"{type(error).__name__}: {error}")
        return PartLost(f"A lost shard could not be restored. {reason}")

    # ---- epochs that begin ahead

    def roll_back(self, why: str) -> None:
        """Let the shards go back to the end of the last epoch if the next one has begun ahead. A slow call.

        No other epoch of the job begins ahead.

        Args:
            why: What has changed, for the log.
        """

        def begin() -> bool:
            begun = self._recovery.roll_back()
            if begun:
                self.rolled_back = self._rolls_back = True
                self._mailbox.add_timer(self._look)
            return begun

        if self._mailbox.handle(begin):
            text = f"{why} between two epochs: the next one begins again, and from now on each one waits for the last."
            self._parts.job_log.write("info", text)
        self._mailbox.wait(lambda: not self._rolls_back or not self.running or None, DEADLINE_S)

    # ---- snapshots

    def _look_at_clock(self) -> float | None:
        """Take a snapshot if one is due; a timer."""
        if self._recovery.stage == "closed":
            return None
        if self._recovery.is_due and not self._due:
            self._due = True
            self._mailbox.start(self._store_due, f"snapshot of {self._parts.job_id}")
        left_s = self._recovery.due_at - self._parts.server.clock.now()
        return left_s if left_s > 0 else POLL_S

    def _store_due(self) -> None:
        try:
            self.store_snapshot()
        except NfdtError as error:
            _log.warning("job %s: no snapshot of the shards: %s", self._parts.job_id, error)
        finally:
            self._due = False

    def renew(self, incarnation: int) -> bool:
        """Store a state that no task leads to: the end of an epoch, or what a client has written.

        If it cannot be stored, the loss of a shard cannot be undone until the next snapshot.

        Returns:
            Whether the shards still have this number of restorations, and so that state.
        """
        while self._are_current(incarnation):
            try:
                if self.store_snapshot(exact=True):
                    return True
            except ServerUnreachable:
                self.shards.flush()  # waits for the successors of lost shards
            except NfdtError as error:
                _log.warning("job %s: the state of the shards could not be stored: %s", self._parts.job_id, error)
                self.forgo(incarnation)
                break
        return self._recovery.attempt == incarnation

    def forgo(self, incarnation: int) -> None:
        """Do not store the state of the shards of this number of restorations: a loss ends the run from now on."""
        self._mailbox.handle(lambda: self._recovery.unstorable(incarnation))

    def _are_current(self, incarnation: int) -> bool:
        """Wait while shards are being restored; return whether they have this number of restorations."""
        current = self._mailbox.wait(lambda: None if self.running else self._recovery.serves(incarnation), DEADLINE_S)
        return bool(current)

    def store_snapshot(self, *, exact: bool = False) -> bool:
        """Store the state of all shards; return False if shards are being restored, or the job ends.

        ``exact``: no push is on its way.

        Raises:
            NfdtError: A shard does not answer, or the state cannot be stored.
        """
        begun = self._mailbox.wait(
            lambda: None if self._recovery.taking else self._recovery.begin_snapshot(), SNAPSHOT_S
        )
        if begun is None:
            raise NotStored(f"Another snapshot of the shards has taken more than {SNAPSHOT_S:.0f} s.")
        if not begun:
            return False
        recorded = False
        try:
            if self._await_quiet():
                rest = Rest(self._coordinator.merger.current)
                snapshot = self.shards.snapshot(self._go_on, self._parts.server.artifacts, rest)
                recorded = self._store(snapshot, rest if exact else None)
        finally:
            self._mailbox.handle(lambda: self._recovery.end_snapshot(recorded=recorded))
        return recorded

    def _await_quiet(self) -> bool:
        """Wait until no round is open; return False if shards are being restored, or the job ends."""

        def step() -> str | None:
            found = self._recovery.snapshot_step()
            return None if found == "wait" else found

        return self._mailbox.wait(step, QUIET_S) == "copy"

    def _go_on(self) -> None:
        self._mailbox.handle(self._recovery.go_on)

    def outdate(self) -> None:
        """Record that the shards get another state than that of the newest snapshot."""
        self._present = None

    def present_state(self) -> str:
        """Return the artifact of the newest snapshot if no epoch has begun since, and nothing has changed; else ""."""
        rest, now = self._present, self._coordinator.merger.current
        same = rest is not None and len(rest.untrained) == len(now)
        if rest is None or not same or any(map(operator.is_not, rest.untrained, now)):
            return ""
        return self._slots.shard_state.state

    def _store(self, snapshot: ShardSnapshot, exact: Rest | None) -> bool:
        """Rely on a stored snapshot; return False, and delete it, if no shard has that state any more.

        ``exact``: what the state of an exact snapshot has besides that of the shards; None: another snapshot.
        """
        stored = ShardState(snapshot.state, snapshot.records)

        def adopt() -> tuple[bool, EpochProgress | None]:
            if not self._recovery.adopt(snapshot.tasks, exact=exact is not None):
                return False, None
            self._present = exact
            self._replaced |= self._slots.shard_state.artifacts
            self._slots.shard_state = stored
            self._parts.fetchable.update(stored.artifacts)
            return True, self._recovery.progress()

        adopted, progress = self._mailbox.handle(adopt)
        if not adopted:
            self._delete(stored.artifacts)
            return False
        self._parts.job_log.snapshot(stored.state, progress, stored.records)
        self._delete(self._replaced)
        self._replaced = set()
        return True

    def delete_snapshot(self) -> None:
        """Delete the newest snapshot, because the job has its result; leave it to the server's quota if that fails."""
        if self._mailbox.wait(lambda: not self._recovery.taking or None, SNAPSHOT_S) is None:
            return
        with contextlib.suppress(NotStored):
            self._parts.job_log.snapshot("", None, "")
            last, self._slots.shard_state = self._slots.shard_state, ShardState()
            self._delete(last.artifacts | self._replaced)

    def _delete(self, artifacts: set[str]) -> None:
        """Delete files of snapshots that are part of nothing else."""
        for name in artifacts - self._slots.shard_state.artifacts - self._parts.job_log.needed():
            self._parts.fetchable.discard(name)
            self._parts.server.artifacts.delete(name)
