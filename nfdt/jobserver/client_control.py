"""What the clients of a job have said so far, and whether any of them is still there."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.core.errors import UsageError


@dataclass
class ClientControl:
    """The job's run reads these under its lock.

    Attributes:
        attended: A client decides at each epoch's end; it may have gone, then nobody does any more.
        permitted: The last epoch that the client lets begin.
        until: So many of its steps; there, and at its end, it stands still. None: it does not.
        stop_training: The client wants the job to end cleanly; taken once.
        learning_rate: The last one set.
        watchers: Clients that watch.
        unwatched_since: When the number of watchers changed last.
    """

    attended: bool
    unwatched_since: float
    permitted: int = -1
    until: int | None = None
    stop_training: bool = False
    learning_rate: float | None = None
    watchers: int = 0

    def watch(self, change: int, now: float) -> None:
        """One client more or less."""
        self.watchers += change
        self.unwatched_since = now

    def permit(self, epoch: int, until: int | None) -> None:
        """The client lets an epoch begin, or go on where it stands still."""
        if epoch >= self.permitted:
            self.permitted, self.until = epoch, until

    def permits(self, epoch: int) -> bool:
        """Whether this epoch may begin."""
        return not self.attended or self.permitted >= epoch

    def steps_of(self, epoch: int) -> int | None:
        """After how many steps of this epoch, and at its end, it stands still; None: never, or no longer."""
        return self.until if self.attended and epoch == self.permitted else None

    def set_learning_rate(self, value: float) -> None:
        """Note another learning rate.

        Raises:
            UsageError: negative, infinite or no number.
        """
        if not 0 <= value < float("inf"):
            raise UsageError(f"learning_rate: expected a number >= 0. Received: {value}.")
        self.learning_rate = value

    def take_stop(self) -> bool:
        """Whether the client wants the job to end cleanly and has not been heard yet."""
        wanted, self.stop_training = self.stop_training, False
        return wanted

    def abandoned(self, now: float, timeout_s: float) -> bool:
        """Whether an attended job has been without a client for too long."""
        return self.attended and self.watchers <= 0 and now - self.unwatched_since >= timeout_s
