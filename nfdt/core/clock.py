"""Source of time as an argument, so that pure code can be tested and simulated."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return the seconds since an arbitrary start; never decreases."""


LONGEST_S = 1.0  # between two readings of a clock by a process that is not suspended


class AwakeClock:
    """Clock that stands still while this process is suspended; any thread may read it.

    It is read often; the time between two readings counts up to :data:`LONGEST_S`. Silence that is measured with it
    is that of the other side, not that of this process.

    Args:
        clock: The clock of the machine.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._read_at, self._awake_s = self._clock.now(), 0.0

    def now(self) -> float:
        """Return the seconds for which this process was not suspended since the clock was made."""
        with self._lock:
            now = self._clock.now()
            self._awake_s += min(max(now - self._read_at, 0.0), LONGEST_S)
            self._read_at = now
            return self._awake_s


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return the seconds since the machine's start."""
        return time.monotonic()
