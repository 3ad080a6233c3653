"""Time limit for writes to a full disk, which are tried again."""

from __future__ import annotations

import logging

from nfdt.core.clock import Clock
from nfdt.core.errors import NotStored

_log = logging.getLogger(__name__)

LIMIT_S = 60.0  # time without room on the disk after which a job fails
PAUSE_S = 1.0  # pause between two attempts


class DiskPatience:
    """Time limit for consecutive failures to write, and one warning about them.

    Args:
        job_id: The job, for the warning.
        clock: Clock of the server.
    """

    def __init__(self, job_id: str, clock: Clock) -> None:
        self._job_id, self._clock = job_id, clock
        self._since: float | None = None

    def success(self) -> None:
        """Record that everything is written."""
        self._since = None

    def failure(self, error: NotStored) -> bool:
        """Record a failed attempt and return whether it is the first one."""
        if self._since is not None:
            return False
        self._since = self._clock.now()
        _log.warning("job %s: %s It is tried again for %.0f s.", self._job_id, error, LIMIT_S)
        return True

    def check(self, error: NotStored) -> None:
        """Raise after the time limit.

        Raises:
            NotStored: No attempt has succeeded within the limit; the message is that of ``error``.
        """
        if self._since is not None and self._clock.now() - self._since >= LIMIT_S:
            raise NotStored(f"{error} It was tried again for {LIMIT_S:.0f} s.") from error
