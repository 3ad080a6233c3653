"""Where the training of an epoch stands still for its client."""

from __future__ import annotations


class Gate:
    """Lets an epoch's steps through up to a number, and stands still there, and at the epoch's end, for the client.

    Args:
        until: So many steps of the epoch; None: it never stands still.

    Attributes:
        standing: It has been said that nothing goes on, and the client has not answered.
    """

    def __init__(self, until: int | None) -> None:
        self.standing = False
        self._until = until
        self._told = 0  # steps after which it stands or stood last

    @property
    def open(self) -> bool:
        """Whether it never stands still."""
        return self._until is None

    def left(self, finished: int) -> int:
        """How many steps more may be finished; only where it is not open."""
        assert self._until is not None
        return 0 if self.standing else max(0, self._until - finished)

    def is_due(self, finished: int, ended: bool) -> bool:
        """Whether it has to stand still after so many steps; ``ended``: the epoch has no more."""
        if self._until is None or self.standing:
            return False
        return finished > self._told and (finished >= self._until or ended)

    def stand(self, finished: int) -> None:
        """Nothing goes on after so many steps, unless it was opened meanwhile."""
        self.standing, self._told = not self.open, finished

    def go_on(self, until: int | None) -> None:
        """The client lets more steps through; what names no more than before changes nothing."""
        if until is None or until > self._told:
            self.standing, self._until = False, until
