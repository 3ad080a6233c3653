"""The order in which concurrent pushes update the stripes of a shard; see :mod:`nfdt.shard.loop_engine`."""

from __future__ import annotations

import threading

from nfdt.core.errors import NfdtError

UPDATE_S = 60.0
"""Longest wait for the push before, whose part takes milliseconds."""


class PendingUpdate:
    """Place of one push in the order of updates, each of which works on one stripe after the other.

    Args:
        before: The update before, or None.
        stripes: Number of stripes.
    """

    def __init__(self, before: PendingUpdate | None, stripes: int) -> None:
        self._before, self._stripes = before, stripes
        self._done, self._failed = 0, False
        self._advanced = threading.Condition()

    def wait(self, stripe: int) -> None:
        """Wait until the push before has updated this stripe; raises the errors of :meth:`reach`."""
        if self._before is not None:
            self._before.reach(stripe + 1)

    def reach(self, count: int) -> None:
        """Wait until this push has updated ``count`` stripes, or all.

        Raises:
            NfdtError: it takes too long, or this push has failed.
        """
        count = min(count, self._stripes)
        if self._done < count:  # without the lock: the number only grows
            with self._advanced:
                if not self._advanced.wait_for(lambda: self._done >= count, UPDATE_S):
                    raise NfdtError(
                        f"Update: expected the push before to finish its part within {UPDATE_S:g} s. Received: "
                        f"{self._done} of {self._stripes} parts. The shard is overloaded; look at its machine."
                    )
        if self._failed:
            raise NfdtError(
                "Update: expected all parts of the push before. Received: an error; the shard's log has it."
            )

    @property
    def is_complete(self) -> bool:
        """Whether this push has updated all stripes."""
        return self._done >= self._stripes

    def complete(self) -> None:
        """Wait until this push has updated all stripes."""
        self.reach(self._stripes)

    def advance(self, count: int) -> None:
        """Declare ``count`` stripes updated."""
        with self._advanced:
            self._done = count
            self._advanced.notify_all()

    def end(self) -> None:
        """Declare all stripes updated, or the push failed if they are not, and release the push before."""
        self._failed = self._done < self._stripes
        self.advance(self._stripes)
        self._before = None  # else every update would keep all earlier ones alive
