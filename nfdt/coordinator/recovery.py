"""Snapshots and loss of the shards as a state machine: the time without them, and the return to the last snapshot."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Literal

from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.epochs import EpochSequence
from nfdt.coordinator.failover import Fail, FailoverMachine, Resume, Seek
from nfdt.coordinator.membership import Membership
from nfdt.core.clock import Clock
from nfdt.core.specs.job import EpochProgress
from nfdt.schedulers.leases import LeaseBook

COST_SHARE = 0.02  # largest part of the time that snapshots may take
QUIET_S = 60.0  # limit of the wait for the end of a round
RESTORE_S = 180.0  # limit for slots of lost shards, and for the start of all shards
MOST_KILLS = 2  # consecutive kills without a finished sample in between, after which a job ends
MOST_KILLS_UNSTORED = 5  # consecutive kills without a new snapshot in between, after which a job ends
MOST_LOSSES = 5  # consecutive losses of any kind without a finished sample in between, after which a job ends


class Recovery(FailoverMachine):
    """State machine of the shards of a job, and the effects of snapshots and losses on its epochs.

    Calls must not overlap, like those of the coordinator. At most one snapshot is taken at a time::

        begin_snapshot ──> snapshot_step: "wait" ... "copy" ──> go_on ──> adopt ──> end_snapshot
                                          "drop", or any failure ────────────────────────^

    Args:
        epochs: The epochs of the job.
        planner: Tasks of each epoch.
        members: Workers of the job.
        effects: Queue of effects; the return of the shards counts as progress.
        clock: Clock of the job.

    Attributes:
        taking: Whether a snapshot is being taken.
        possible: Whether a loss can be undone; False from a state that could not be stored until the next snapshot.
        due_at: Time of the next snapshot.
    """

    def __init__(
        self, epochs: EpochSequence, planner: EpochPlanner, members: Membership, effects: EffectQueue, clock: Clock
    ) -> None:
        super().__init__(clock, RESTORE_S, f"{{missing}} did not come up within {RESTORE_S:.0f} s; see its log.")
        self._epochs, self._planner, self._members, self._effects = epochs, planner, members, effects
        self._interval_s = planner.spec.cluster.snapshot_s
        self.taking = self._failed = False
        self.possible = True
        self.due_at = clock.now() + self._interval_s
        self._killed_of = self._lost_of = -1  # attempt of the last kill, and of the last loss
        self._kills = self._kills_unstored = self._losses = 0
        self._finished_before = self._finished

    # ---- snapshots

    @property
    def is_due(self) -> bool:
        """Whether a snapshot should begin in the middle of an epoch.

        It is also due where the batches that the server keeps until then leave no room for others, but not right after
        a snapshot that failed.
        """
        early = self._epochs.wants_snapshot and not self._failed
        return self.stage == "serving" and self._epochs.phase == "train" and (early or self._clock.now() >= self.due_at)

    def begin_snapshot(self) -> bool:
        """Begin a snapshot, unless one is being taken, or the shards do not serve; return whether it has begun.

        There is none while an epoch is ahead of its permission: that of the end of the one before is the newest state
        to which the shards may go back. No new round is leased, of the next epoch either, until :meth:`go_on`.
        """
        if self.taking or self.stage != "serving" or self._epochs.ahead is not None:
            return False
        self.taking, self._of, self._began_at = True, self.attempt, self._clock.now()
        self._epochs.quiesced = True
        if self._book is not None:
            self._book.quiesce()
        return True

    def snapshot_step(self) -> Literal["wait", "copy", "drop"]:
        """Return whether the shards may be copied, which hold no part of a round then, or the snapshot is void."""
        if not self.serves(self._of) or self._clock.now() >= self._began_at + QUIET_S:
            return "drop"
        return "copy" if self._book is None or self._book.is_quiet else "wait"

    def adopt(self, contained: Sequence[Container[int]], *, exact: bool) -> bool:
        """Rely on the snapshot, which is stored; return False if no shard has that state any more: it is void.

        Args:
            contained: For each shard, the tasks that its part of the snapshot contains.
            exact: Whether the snapshot contains everything that is finished.
        """
        if not self.taking or not self.serves(self._of):
            return False
        self.possible, self._kills_unstored = True, 0
        if self._book is not None:
            self._book.settle(None if exact else contained)
        return True

    def end_snapshot(self, *, recorded: bool) -> None:
        """Record the end of a snapshot in any way; ``recorded``: a restarted server finds it."""
        now = self._clock.now()
        self.taking, self._failed = False, not recorded
        # A slow store must not take more than its share of the time, however short the interval is.
        self.due_at = max(self._began_at + self._interval_s, now + (now - self._began_at) / COST_SHARE)
        self.go_on()

    def unstorable(self, attempt: int) -> None:
        """Record that a state that no task leads to, and that the shards of this attempt had, could not be stored."""
        self.possible = self.possible and not self.serves(attempt)

    def go_on(self) -> None:
        """Lease rounds again: the shards have copied their state. Does nothing the second time."""
        self._epochs.quiesced = False
        if self._book is not None:
            self._book.go_on()
        self._epochs.advance()

    def progress(self) -> EpochProgress | None:
        """Return the settled part of the current epoch; None: it begins with the job, or its rows have no numbers."""
        if self._book is not None:
            progress = self._book.progress(self._epochs.epoch)
        else:
            progress = self._planner.beginning(self._epochs.epoch) if self._epochs.ended is None else None
        return progress and progress.model_copy(update={"task": self._planner.next_task})

    # ---- losses

    def lost(self, part: str, how: str, *, killed: bool = False) -> Seek | Fail | None:
        """Record the loss of a shard: workers wait, and no phase begins until the shards are restored.

        The job ends where shards are lost without progress in between: they need more memory than there is. How a
        process ended is unknown where this server has not started it.
        """
        if self.stage != "closed" and (vain := self._count_loss() or (killed and self._count_kill())):
            self.close()
            return Fail(f"Shards were {vain} in between, last {part} ({how}).", memory=True)
        if not self.possible and self.stage != "closed":
            self.close()
            return Fail(f"{part} is lost ({how}), and the newest state of the shards could not be stored.")
        return self._suspend(part, how)

    def roll_back(self) -> bool:
        """Let the shards go back to the end of the last epoch, if the next one is ahead; return whether it was.

        Something has changed before the next epoch: from now on none begins early.
        """
        self._epochs.forgo_early()
        return self._epochs.ahead is not None and self._suspend("", "") is not None

    def _suspend(self, part: str, how: str) -> Seek | Fail | None:
        found = super().lost(part, how)
        if found is not None:
            self._epochs.suspended = True
            self._epochs.drop_ahead()
            self.go_on()
            if self._epochs.run is not None:
                self._epochs.run.suspend()
        return found

    def called(self, attempt: int, *, answered: bool) -> Resume | None:
        """Record whether the shards answer that have gone back to the newest snapshot.

        If they do, what is leased or not settled is leased again. Reports from before must not arrive after this call.
        """
        found = super().called(attempt, answered=answered)
        if found is None:
            return None
        now, self._epochs.suspended = self._clock.now(), False
        self._members.interrupted(now)
        redone = self._epochs.run.rewind() if self._epochs.run is not None else 0
        self._finished_before = self._finished
        self._effects.progressed(now, self._epochs.epoch, None)
        self._epochs.advance()
        return Resume(found.seconds, redone)

    def _count_loss(self) -> str:
        """Count a loss, of several shards at a time as one; return how many were in vain, "" if there may be more."""
        if self._lost_of == self.attempt:
            return ""
        self._lost_of = self.attempt
        self._losses = 1 if self._finished != self._finished_before else self._losses + 1
        return "" if self._losses < MOST_LOSSES else f"lost {self._losses} times without progress"

    def _count_kill(self) -> str:
        """Count a kill as :meth:`_count_loss` counts a loss."""
        if self._killed_of == self.attempt:
            return ""
        self._killed_of = self.attempt
        self._kills = 1 if self._finished != self._finished_before else self._kills + 1
        self._kills_unstored += 1
        if self._kills >= MOST_KILLS:
            return f"killed {self._kills} times without progress"
        stored = self._kills_unstored < MOST_KILLS_UNSTORED
        return "" if stored else f"killed {self._kills_unstored} times without a new snapshot"

    @property
    def _finished(self) -> tuple[int, int]:
        """Numbers of epochs that have ended, and of samples of the current one that are finished."""
        return self._epochs.epochs_ended, 0 if self._book is None else self._book.samples_finished

    @property
    def _book(self) -> LeaseBook | None:
        return None if self._epochs.run is None else self._epochs.run.training.book
