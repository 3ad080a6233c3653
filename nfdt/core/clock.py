"""Time as a value that is passed in, so that pure code can be tested and simulated."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return the seconds since an arbitrary start; never decreases."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return the seconds since the machine's start."""
        return time.monotonic()


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
