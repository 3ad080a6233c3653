"""Retries with a time limit: how long to try, how long to pause, and what the final error says."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from nfdt.core.errors import NfdtError

logger = logging.getLogger(__name__)

PAUSE_S = 0.5


class Patience:
    """Limits the time of consecutive failures, and pauses after each of them.

    Args:
        limit_s: The limit, counted from the first of them.
        stopped: Set when retries have become pointless; None: they never do.
        pause: Pauses for at most so many seconds before the next attempt, and returns whether the other side is
            connected; None: a pause of :data:`PAUSE_S`, or until ``stopped``.
        settled_s: A connected attempt that lasted longer than this was a success until it failed: the time starts anew.
        report_s: Time without an answer after which a warning says that attempts go on.
    """

    def __init__(
        self,
        limit_s: float,
        stopped: threading.Event | None = None,
        *,
        pause: Callable[[float], bool] | None = None,
        settled_s: float = math.inf,
        report_s: float = math.inf,
    ) -> None:
        self._limit_s, self._settled_s, self._report_s = limit_s, settled_s, report_s
        self._stopped = stopped or threading.Event()
        self._pause = pause or self._wait
        self._until: float | None = None
        self._reported = False
        self._connected, self._attempted_at = True, time.monotonic()

    @property
    def left_s(self) -> float:
        """Remaining time; the whole limit without a failure."""
        return self._limit_s if self._until is None else self._until - time.monotonic()

    def success(self) -> None:
        """Record an answer of the other side."""
        self._until = None

    def failure(self, since: float | None = None) -> bool:
        """Record that a call made at ``since`` (default: now) failed, pause, and return whether to try again."""
        return self._count_failure(since) > 0 and self._paused()

    def again(self, problem: NfdtError, since: float | None = None) -> None:
        """Record a failed call as :meth:`failure` does, and log the problem.

        Raises:
            NfdtError: the problem, and how long it was tried; without that if retries have become pointless.
        """
        left_s = self._count_failure(since)
        if left_s <= 0:
            raise type(problem)(f"{problem} Gave up after {self._limit_s:.0f} s.") from problem
        reports = not self._reported and self._limit_s - left_s >= self._report_s
        self._reported |= reports
        more = f" for {self._limit_s:.0f} s, in case it is being restarted" if reports else ""
        logger.log(logging.WARNING if reports else logging.INFO, "%s Trying again%s.", problem, more)
        if not self._paused():
            raise problem

    def _count_failure(self, since: float | None) -> float:
        """Start the time at the first failure; return the seconds that are left."""
        now = time.monotonic()
        if self._until is None or (self._connected and now - self._attempted_at > self._settled_s):
            self._until, self._reported = (since or now) + self._limit_s, False
        return self._until - now

    def _paused(self) -> bool:
        """Pause; return whether to try again."""
        self._connected = self._pause(max(0.0, self.left_s))
        self._attempted_at = time.monotonic()
        return not self._stopped.is_set()

    def _wait(self, left_s: float) -> bool:
        self._stopped.wait(min(PAUSE_S, left_s))
        return True
