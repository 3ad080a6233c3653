"""Signs of life from a piece of work that takes long."""

from __future__ import annotations

import time
from collections.abc import Callable


class Heartbeat:
    """Called whenever the work has advanced; tells so, but not too often.

    It has no thread: work that hangs calls it no more, and is noticed by its silence.

    Args:
        tell: Sends one sign of life.
        every_s: Seconds between two of them, at least.
        clock: Seconds.
    """

    def __init__(self, tell: Callable[[], object], every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._every_s, self._clock = tell, every_s, clock
        self._told_at = clock()

    def __call__(self) -> None:
        """The work has advanced."""
        now = self._clock()
        if now - self._told_at >= self._every_s:
            self._told_at = now
            self._tell()
