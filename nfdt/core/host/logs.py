"""The log of a process on its standard error: no control characters, and no message again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

REPEAT_S = 1.0
MOST = 256  # messages whose time is remembered; the oldest are forgotten first
_INDENT = "\n    "


def log_to_stderr(level: str) -> None:
    """Send this process's log to standard error, from a level on; a process that logs already goes on as before."""
    handler = SparingHandler()
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def escape(text: str) -> str:
    """Return text with its control characters as Python shows them: they would move the cursor or forge a line."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class EscapingFormatter(logging.Formatter):
    """Formatter that escapes control characters in messages, and indents the lines of a message but for the first."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in the base class
        """Return the line of a record, whose message may hold names that a client chose."""
        record.message = _INDENT.join(map(escape, record.message.split("\n")))
        return super().formatMessage(record)


class SparingHandler(logging.StreamHandler):
    """Handler that writes the same message once a second at most; the next one states how often it was repeated.

    Args:
        stream: Where it writes; default: standard error.
        clock: Returns the time in seconds.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._written: dict[tuple[str, str], tuple[float, int]] = {}  # when, and how often it came again since

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or only count it. The caller holds the handler's lock."""
        message, now = record.getMessage(), self._clock()
        key = record.name, message
        at, repeated = self._written.pop(key, (now - REPEAT_S, 0))
        if now - at < REPEAT_S:
            self._written[key] = at, repeated + 1
            return
        self._written[key] = now, 0
        if len(self._written) > MOST:
            del self._written[next(iter(self._written))]
        if repeated:
            record.msg, record.args = f"{message} ({repeated} more of this since the last line)", ()
        super().emit(record)
