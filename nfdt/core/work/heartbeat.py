"""Heartbeats of long-running work."""

from __future__ import annotations

import time
from collections.abc import Callable


class Heartbeat:
    """Called whenever the work has advanced; sends a heartbeat, at a limited rate.

    It has no thread: work that hangs sends no heartbeats, which is how it is detected.

    Args:
        send: Sends one heartbeat.
        every_s: Least number of seconds between two of them.
        clock: Returns seconds.
    """

    def __init__(self, send: Callable[[], object], every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._every_s, self._clock = send, every_s, clock
        self._sent_at = clock()

    def __call__(self) -> None:
        """Note that the work has advanced."""
        now = self._clock()
        if now - self._sent_at >= self._every_s:
            self._sent_at = now
            self._send()
