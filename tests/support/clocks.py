"""Clocks of tests."""

from __future__ import annotations


class ManualClock:
    """A clock that moves only by :meth:`advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the time last set."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds
