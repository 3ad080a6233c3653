"""Sessions of browsers: links that open the page once, and the cookies for which they are exchanged."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from nfdt.core.jobs.rights import Holder

LINK_S = 600.0  # time in which a link must be opened
SESSION_S = 12 * 3600.0  # time for which a cookie is valid
MOST = 1000  # links, and cookies, that are valid at the same time; the oldest are forgotten first


class _Keys:
    """Random keys that stand for holders of tokens until they expire."""

    def __init__(self, valid_s: float, clock: Callable[[], float]) -> None:
        self._valid_s, self._clock = valid_s, clock
        self._holders: dict[str, tuple[Holder, float]] = {}

    def add(self, holder: Holder) -> str:
        while len(self._holders) >= MOST:
            del self._holders[next(iter(self._holders))]
        key = secrets.token_urlsafe(32)
        self._holders[key] = holder, self._clock() + self._valid_s
        return key

    def find(self, key: str, *, remove: bool = False) -> Holder | None:
        holder, until = (self._holders.pop if remove else self._holders.get)(key, None) or (None, 0.0)
        return holder if self._clock() < until else None


class PageSessions:
    """Links and cookies of the page; each has the rights of the token with which the link was requested.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._links, self._cookies = _Keys(LINK_S, clock), _Keys(SESSION_S, clock)

    def make_link(self, holder: Holder) -> str:
        """Return a key that can be redeemed once."""
        with self._lock:
            return self._links.add(holder)

    def redeem(self, link: str) -> str | None:
        """Return a cookie for the key of a link; None for one that is unknown, expired or redeemed."""
        with self._lock:
            holder = self._links.find(link, remove=True)
            return self._cookies.add(holder) if holder is not None else None

    def holder(self, cookie: str) -> Holder | None:
        """Return the holder of a cookie; None for one that is unknown or expired."""
        with self._lock:
            return self._cookies.find(cookie)
