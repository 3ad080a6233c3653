"""Requests of a job's clients so far, and whether a client is still connected."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nfdt.core.errors import JobTaken, UsageError


@dataclass
class ClientControl:
    """Requests of the clients of one job, guarded by the job's lock.

    Attributes:
        interactive: Whether a client permits each epoch (an interactive job); False once that client is gone.
        unwatched_since: Time of the last change of ``watchers``.
        permitted: Last epoch that the client permits.
        until: Number of steps of that epoch after which it pauses, as at its end; None: no pause.
        stop_training: Whether the client has requested a clean end of the job; taken once.
        learning_rate: Last learning rate that was set.
        weights: Artifact of the state that was set before training began.
        watchers: Number of clients that watch the job.
        attached: Number of watches of each client session that runs callbacks; more than one while it reconnects.
    """

    interactive: bool
    unwatched_since: float
    permitted: int = -1
    until: int | None = None
    stop_training: bool = False
    learning_rate: float | None = None
    weights: str | None = None
    watchers: int = 0
    attached: Counter[str] = field(default_factory=Counter)

    def watch(self, change: int, now: float, session: str = "") -> None:
        """Add ``change`` to the number of watching clients; one with a session permits the epochs from then on.

        Raises:
            JobTaken: The client of another session does so.
        """
        if session:
            if change > 0:
                self.check_free(session)
                self.interactive = True
            self.attached[session] += change
        self.watchers += change
        self.unwatched_since = now

    def check_free(self, session: str) -> None:
        """Raise JobTaken if the client of another session is attached."""
        if any(count > 0 and one != session for one, count in self.attached.items()):
            raise JobTaken(
                "The job is attached to another script. Expected: one script at a time. End that script first; where "
                "its machine has failed, the server notices within 90 s."
            )

    def permit(self, epoch: int, until: int | None) -> None:
        """Permit an epoch to begin, or to resume after a pause."""
        if epoch >= self.permitted:
            self.permitted, self.until = epoch, until

    def permits(self, epoch: int) -> bool:
        """Whether this epoch may begin."""
        return not self.interactive or self.permitted >= epoch

    def steps_of(self, epoch: int) -> int | None:
        """Return the number of steps after which this epoch pauses, as at its end; None: no pause."""
        return self.until if self.interactive and epoch == self.permitted else None

    def set_learning_rate(self, value: float) -> None:
        """Set another learning rate.

        Raises:
            UsageError: The value is negative, infinite or no number.
        """
        if not 0 <= value < float("inf"):
            raise UsageError(f"learning_rate: expected a number >= 0. Received: {value}.")
        self.learning_rate = value

    def pop_stop(self) -> bool:
        """Return whether the client has requested a clean end; True once per request."""
        wanted, self.stop_training = self.stop_training, False
        return wanted

    def abandoned(self, now: float, timeout_s: float) -> bool:
        """Whether an interactive job has been without a client for too long."""
        return self.interactive and self.watchers <= 0 and now - self.unwatched_since >= timeout_s
