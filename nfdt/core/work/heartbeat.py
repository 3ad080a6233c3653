"""Heartbeats of long-running work."""

from __future__ import annotations

import time
from collections.abc import Callable


class Heartbeat:
    """Sends heartbeats at a limited rate; called whenever the work has advanced.

    It has no thread of its own. Work that hangs therefore sends none, and this is how the server notices it.

    Args:
        send: Sends one heartbeat.
        every_s: Least number of seconds between two of them.
        clock: Returns seconds.
    """

    def __init__(self, send: Callable[[], object], every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._every_s, self._clock = send, every_s, clock
        self._sent_at = clock()

    def __call__(self) -> None:
        """Send a heartbeat if the last one is old enough."""
        now = self._clock()
        if now - self._sent_at >= self._every_s:
            self._sent_at = now
            self._send()
