"""The permission to begin an epoch and to go on with its steps: the only place that keeps it."""

from __future__ import annotations


class Gate:
    """Lets epochs begin, lets their steps through up to a number, and stands still there for the client.

    Args:
        permitted: Last epoch that may begin.
        held: Whether every epoch also waits for :meth:`release`, which its server calls between two epochs.

    Attributes:
        standing: Whether the client knows that nothing goes on, and has not answered.
    """

    def __init__(self, permitted: int, *, held: bool = False) -> None:
        self.standing = False
        self._permitted = permitted
        self._held, self._released = held, not held
        self._until: int | None = None  # steps of the epoch that are let through; None: all
        self._next_until: int | None = None  # the same of the epoch that begins next
        self._stood_at = 0  # steps after which it stands or stood last

    # ---- epochs

    def is_permitted(self, epoch: int) -> bool:
        """Whether the client lets this epoch begin."""
        return self._permitted >= epoch

    def may_begin(self, epoch: int) -> bool:
        """Whether the client and the server let this epoch begin."""
        return self._released and self.is_permitted(epoch)

    def permit(self, epoch: int, until: int | None) -> None:
        """Let this epoch and those before it begin; the one that begins next stands still after ``until`` steps."""
        self._permitted = max(self._permitted, epoch)
        self._next_until = until

    def release(self) -> None:
        """Let the next epoch begin once it is permitted."""
        self._released = True

    def begin_epoch(self) -> None:
        """Begin an epoch: nothing of it has stood still yet."""
        self.standing, self._until, self._stood_at = False, self._next_until, 0
        self._released = not self._held

    # ---- steps

    @property
    def open(self) -> bool:
        """Whether the epoch never stands still."""
        return self._until is None

    def left(self, finished: int) -> int:
        """How many steps more may be finished; only where it is not open."""
        assert self._until is not None
        return 0 if self.standing else max(0, self._until - finished)

    def is_due(self, finished: int, ended: bool) -> bool:
        """Whether it has to stand still after so many steps; ``ended``: the epoch has no more."""
        if self._until is None or self.standing:
            return False
        return finished > self._stood_at and (finished >= self._until or ended)

    def stand(self, finished: int) -> None:
        """Stand still after so many steps, unless it was opened meanwhile."""
        self.standing, self._stood_at = not self.open, finished

    def go_on(self, until: int | None) -> None:
        """Let more steps through; a number that is not greater than before changes nothing."""
        if until is None or until > self._stood_at:
            self.standing, self._until = False, until
