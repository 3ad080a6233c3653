"""Snapshots and loss of the shards: the time without them, and the return to the last snapshot."""

from __future__ import annotations

from collections.abc import Container, Sequence

from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.epochs import EpochSequence
from nfdt.coordinator.membership import Membership
from nfdt.core.clock import Clock
from nfdt.core.specs.job import EpochProgress
from nfdt.schedulers import LeaseBook


class Recovery:
    """The effects of snapshots and losses on the epochs of a job; calls exclude each other as the coordinator's do.

    Args:
        epochs: The epochs of the job.
        planner: Tasks of each epoch.
        members: Workers of the job.
        effects: Receives that a restored job is active.
        clock: Clock of the job.

    Attributes:
        redone_samples: Number of samples that were trained again after losses of shards.
    """

    def __init__(
        self, epochs: EpochSequence, planner: EpochPlanner, members: Membership, effects: EffectQueue, clock: Clock
    ) -> None:
        self._epochs, self._planner, self._members, self._effects, self._clock = (
            epochs,
            planner,
            members,
            effects,
            clock,
        )
        self.redone_samples = 0

    # ---- snapshots

    def quiesce(self) -> None:
        """Record that a snapshot begins; lease no new round, of the next epoch either, until :meth:`go_on`."""
        self._epochs.quiesced = True
        if self._book is not None:
            self._book.quiesce()

    @property
    def is_quiet(self) -> bool:
        """Whether the shards hold no part of a round. Without rounds, this is true unless they are lost."""
        return not self._epochs.suspended and (self._book is None or self._book.is_quiet)

    def go_on(self) -> None:
        """Lease rounds again: the shards have copied their state. Does nothing without :meth:`quiesce`."""
        self._lease_rounds()
        self._epochs.advance()

    def settle(self, contained: Sequence[Container[int]], *, exact: bool = False) -> None:
        """Record that a snapshot is stored, which began with :meth:`quiesce` and after the last loss.

        Args:
            contained: For each shard, the tasks that its part of the snapshot contains.
            exact: Whether the snapshot contains everything that is finished.
        """
        if self._book is not None:
            self._book.settle(None if exact else contained)

    def progress(self) -> EpochProgress | None:
        """Return the settled part of the current epoch; None: it begins with the job, or its rows have no numbers."""
        if self._book is not None:
            progress = self._book.progress(self._epochs.epoch)
        else:
            progress = self._planner.beginning(self._epochs.epoch) if self._epochs.ended is None else None
        return progress and progress.model_copy(update={"task": self._planner.next_task})

    @property
    def trained(self) -> bool:
        """Whether all tasks of the current epoch are trained."""
        return self._epochs.run is not None and self._epochs.run.trained

    # ---- losses

    def suspend(self) -> None:
        """Record that shards are lost: workers wait, and no phase begins until :meth:`resume`.

        A snapshot that has begun is lost too.
        """
        if self._epochs.suspended:
            return
        self._epochs.suspended = True
        self._lease_rounds()
        if self._epochs.run is not None:
            self._epochs.run.suspend()

    def resume(self) -> int:
        """Go on with shards that have gone back to the last settled snapshot; return the number of samples to redo.

        What is leased or not settled is leased again. Reports from before this call must not arrive after it.
        """
        redone, now = 0, self._clock.now()
        if self._epochs.suspended:
            self._epochs.suspended = False
            self._members.interrupted(now)
            redone = self._epochs.run.rewind() if self._epochs.run is not None else 0
            self.redone_samples += redone
        self._effects.useful(now, self._epochs.epoch, None)
        self._epochs.advance()
        return redone

    def _lease_rounds(self) -> None:
        self._epochs.quiesced = False
        if self._book is not None:
            self._book.go_on()

    @property
    def _book(self) -> LeaseBook | None:
        return None if self._epochs.run is None else self._epochs.run.training.book
