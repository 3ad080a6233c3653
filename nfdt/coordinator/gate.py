"""The only store of the permission to begin an epoch and to continue with its steps."""

from __future__ import annotations


class Gate:
    """Permission for epochs to begin and for their steps up to a number; there the epoch pauses for the client.

    Args:
        permitted: Last epoch that may begin.
        held: Whether every epoch also waits for :meth:`release`, which the server calls between two epochs.

    Attributes:
        standing: Whether the epoch is paused: the client has been notified and has not answered.
        stood_at: Number of finished steps of the epoch at its last pause; 0 before the first one.
    """

    def __init__(self, permitted: int, *, held: bool = False) -> None:
        self.standing = False
        self._permitted = permitted
        self._held, self._released = held, not held
        self._until: int | None = None  # steps of the epoch that are permitted; None: all
        self._next_until: int | None = None  # the same for the epoch that begins next
        self.stood_at = 0

    # ---- epochs

    def is_permitted(self, epoch: int) -> bool:
        """Whether the client permits this epoch to begin."""
        return self._permitted >= epoch

    def may_begin(self, epoch: int) -> bool:
        """Whether the client and the server permit this epoch to begin."""
        return self._released and self.is_permitted(epoch)

    def permit(self, epoch: int, until: int | None) -> None:
        """Permit this epoch and those before it to begin; the one that begins next pauses after ``until`` steps."""
        self._permitted = max(self._permitted, epoch)
        self._next_until = until

    def release(self) -> None:
        """Let the next epoch begin as soon as it is permitted."""
        self._released = True

    def begin_epoch(self) -> None:
        """Begin an epoch that has not paused yet."""
        self.standing, self._until, self.stood_at = False, self._next_until, 0
        self._released = not self._held

    # ---- steps

    @property
    def open(self) -> bool:
        """Whether the epoch never pauses."""
        return self._until is None

    def left(self, finished: int) -> int:
        """Return the number of steps that may still be finished; only for a gate that is not open."""
        assert self._until is not None
        return 0 if self.standing else max(0, self._until - finished)

    def is_due(self, finished: int, ended: bool) -> bool:
        """Whether the epoch must pause after ``finished`` steps; ``ended``: it has no more steps."""
        if self._until is None or self.standing:
            return False
        return finished > self.stood_at and (finished >= self._until or ended)

    def stand(self, finished: int) -> None:
        """Pause after ``finished`` steps, unless the gate was opened meanwhile."""
        self.standing, self.stood_at = not self.open, finished

    def go_on(self, until: int | None) -> None:
        """Permit more steps; a number that is not greater than before has no effect."""
        if until is None or until > self.stood_at:
            self.standing, self._until = False, until
