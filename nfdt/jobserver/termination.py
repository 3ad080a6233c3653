"""Reason for the end of a job: of several simultaneous ones, the one that explains the others."""

from __future__ import annotations

import threading

from nfdt.core.clock import Clock
from nfdt.core.errors import ServerUnreachable
from nfdt.jobserver.outcome import SlotError

CAUSE_WAIT_S = 2.0  # time to wait for the process end that explains a broken connection


class ServerStopping(Exception):
    """Stop of the server: the end of the job is not written; the next server settles it."""


class Termination:
    """First cause of a job's end; a broken connection is replaced by the reason why it broke.

    Args:
        changed: Condition of the job; callers hold it for :meth:`end` and :meth:`check`.
        clock: Clock of the server.

    Attributes:
        cause: Current cause; None: the job continues.
    """

    def __init__(self, changed: threading.Condition, clock: Clock) -> None:
        self._changed, self._clock = changed, clock
        self.cause: BaseException | None = None
        self._blame_until: float | None = None

    def end(self, cause: BaseException) -> None:
        """Add a cause."""
        vague = isinstance(cause, SlotError) and cause.lost_connection
        if self.cause is not None and (vague or self._blame_until is None) and not isinstance(cause, ServerStopping):
            return
        self.cause = cause
        self._blame_until = self._clock.now() + CAUSE_WAIT_S if vague else None
        self._changed.notify_all()

    def check(self) -> None:
        """Raise the cause, if there is one and no better one is expected."""
        if self.cause is not None and (self._blame_until is None or self._clock.now() >= self._blame_until):
            raise self.cause

    def reason_behind(self, error: BaseException) -> BaseException:
        """Return a better explanation of ``error``, after waiting for a possible one."""
        if not isinstance(error, ServerUnreachable):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None and self._blame_until is None, CAUSE_WAIT_S)
            return self.cause or error
