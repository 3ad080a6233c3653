"""Source of time as an argument, so that pure code can be tested and simulated."""

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
