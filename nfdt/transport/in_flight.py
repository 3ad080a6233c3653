"""Unanswered pushes of one client: replies are taken in the order of the pushes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from nfdt.core.errors import UsageError
from nfdt.transport.base import Pushed


class InFlightPush:
    """Implementation of :class:`~nfdt.transport.base.PendingPush`.

    Attributes:
        sequence: Sequence number of the push.
        outcome: Reply, or the error in its place; None before.
    """

    def __init__(self, sequence: int, pushes: InFlight) -> None:
        self.sequence = sequence
        self.outcome: Pushed | Exception | None = None
        self._pushes = pushes

    @property
    def arrived(self) -> bool:
        """See ``PendingPush``."""
        return self.outcome is not None or self._pushes.arrived(self)

    def result(self) -> Pushed:
        """See ``PendingPush``."""
        while self.outcome is None:
            self._pushes.take()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class InFlight:
    """Matching of pushes and replies, with a limit on the number of unanswered pushes.

    Args:
        overlap: Number of pushes that may be unanswered while another one is sent.
        take: Waits for the reply to the push with a sequence number.
        arrived: Returns whether the replies to the given number of oldest pushes have arrived.
    """

    def __init__(self, overlap: int, take: Callable[[int], Pushed], arrived: Callable[[int], bool]) -> None:
        self._overlap = overlap
        self._take = take
        self._arrived = arrived
        self._waiting: deque[InFlightPush] = deque()

    def check_push(self) -> None:
        """Raise UsageError if no push may be sent now."""
        if len(self._waiting) > self._overlap:
            raise UsageError(
                f"Push: expected at most {self._overlap} unanswered ones before it, the overlap this client is made "
                f"for. Received: {len(self._waiting)}. Take the result of the oldest first."
            )

    def check_pull(self) -> None:
        """Raise UsageError if weights cannot be pulled now."""
        if self._waiting:
            raise UsageError(f"Pull: expected no unanswered push. Received: {len(self._waiting)}. Take their results.")

    def add(self, sequence: int) -> InFlightPush:
        """Add a push that has been sent."""
        pending = InFlightPush(sequence, self)
        self._waiting.append(pending)
        return pending

    def arrived(self, pending: InFlightPush) -> bool:
        """Return whether the reply to this push, and those to earlier ones, have arrived."""
        return self._arrived(self._waiting.index(pending) + 1)

    def take(self) -> None:
        """Wait for the reply to the oldest push."""
        oldest = self._waiting.popleft()
        try:
            oldest.outcome = self._take(oldest.sequence)
        except Exception as error:  # raised by the result
            oldest.outcome = error
