"""What ends a job: several things may at once, and the one that explains the others wins."""

from __future__ import annotations

import threading

from nfdt.core.clock import Clock
from nfdt.core.errors import ServerUnreachable
from nfdt.jobserver.outcome import SlotError

CAUSE_WAIT_S = 2.0  # how long a broken connection waits for the end of the process that broke it


class ServerStopping(Exception):
    """The server stops: the job's end is not told, the next server settles it."""


class Termination:
    """The first cause wins, except over a broken connection, which gives way to the reason why it broke.

    Args:
        changed: The job's condition; callers hold it for :meth:`end` and :meth:`check`.
        clock: Of the server.
    """

    def __init__(self, changed: threading.Condition, clock: Clock) -> None:
        self._changed, self._clock = changed, clock
        self.cause: BaseException | None = None
        self._blame_until: float | None = None

    def end(self, cause: BaseException) -> None:
        """Let the job end with this."""
        vague = isinstance(cause, SlotError) and cause.lost_connection
        if self.cause is not None and (vague or self._blame_until is None) and not isinstance(cause, ServerStopping):
            return
        self.cause = cause
        self._blame_until = self._clock.now() + CAUSE_WAIT_S if vague else None
        self._changed.notify_all()

    def check(self) -> None:
        """Raise what ends the job, if anything does and nothing better can be expected."""
        if self.cause is not None and (self._blame_until is None or self._clock.now() >= self._blame_until):
            raise self.cause

    def reason_behind(self, error: BaseException) -> BaseException:
        """A better explanation of ``error``, waiting for one a moment where there may be one."""
        if not isinstance(error, ServerUnreachable):
            return error
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None and self._blame_until is None, CAUSE_WAIT_S)
            return self.cause or error
