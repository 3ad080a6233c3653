"""Audit log: one line of JSON for each action of a user, appended to a file that only its owner can read."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from nfdt.core.errors import UsageError
from nfdt.core.jobs.rights import Holder

_log = logging.getLogger(__name__)


class AuditLog:
    """Append-only file of actions; every method may be called from any thread.

    Args:
        path: The file; created with mode 0600 if it does not exist.
        now: Returns the Unix time in seconds.

    Raises:
        UsageError: The file cannot be opened for appending.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self._path, self._now = path, now
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"Audit log: expected a file that this user can append to, or none. Received: {path} "
                f"({error.strerror}). Change its permissions, or choose another state directory."
            ) from None

    def write(self, action: str, holder: Holder, peer: str, job_id: str = "", **details: str) -> None:
        """Append a line; a line that cannot be written (full disk) goes to the server's log instead.

        Args:
            action: Name of the action, such as ``submit``.
            holder: Holder of the token that came with the call.
            peer: Address of the caller.
            job_id: Job that the action is about.
            **details: More fields of the line.
        """
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._now()))
        line = {"at": at, "action": action, "who": holder.owner, "role": holder.role, "from": peer, "job": job_id}
        text = json.dumps({**{key: value for key, value in line.items() if value}, **details}) + "\n"
        try:
            os.write(self._descriptor, text.encode())  # one call: lines of several threads do not mix
        except OSError as error:
            _log.error("%s cannot be written (%s): %s", self._path, error.strerror, text.strip())

    def close(self) -> None:
        """Close the file; nothing can be written afterwards."""
        os.close(self._descriptor)
