"""The job's log receives what the code of a job prints in a slot, and the warnings that are logged there."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.messages import MOST_CHARACTERS, MOST_LINES

FLUSH_S = 0.2  # longest time that a line waits for others


class JobOutput(logging.Handler):
    """Collects the lines of a job in one slot and sends several at a time. Any thread may write.

    Args:
        send: Sends lines to the server.
        origin: Where the whole output is; named in the line that replaces those beyond the limit.
    """

    def __init__(self, send: Callable[[list[pb.OutputLine]], object], origin: str) -> None:
        super().__init__(logging.WARNING)
        self._send, self._origin = send, origin
        self._lines: list[pb.OutputLine] = []
        self._count = 0
        self._guard = threading.Lock()
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Add a logged record."""
        level = "error" if record.levelno >= logging.ERROR else "warning"
        for line in record.getMessage().splitlines():
            self.add(level, line)

    def add(self, level: str, text: str) -> None:
        """Add a line; from the limit on it is only in the slot's own log."""
        with self._guard:
            if self._count > MOST_LINES or not text.strip():
                return
            self._count += 1
            if self._count > MOST_LINES:
                level, text = "warning", f"More than {MOST_LINES} lines: the others are only in {self._origin}."
            self._lines.append(pb.OutputLine(level=level, text=text[:MOST_CHARACTERS]))
            if self._timer is None:
                self._timer = threading.Timer(FLUSH_S, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Send the lines so far."""
        with self._guard:
            lines, self._lines = self._lines, []
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if lines:
                self._send(lines)


class _PrintedLines:
    """Writes text to another stream, and adds its whole lines to the output of the job."""

    def __init__(self, stream: TextIO, output: JobOutput) -> None:
        self._stream, self._output = stream, output
        self._begun = threading.local()  # the line that a thread has begun

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        *lines, rest = (getattr(self._begun, "text", "") + text).split("\n")
        self._begun.text = rest.rpartition("\r")[2][-MOST_CHARACTERS:]
        for line in lines:
            self._output.add("info", line.rpartition("\r")[2])  # of a progress bar its last state
        return written

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def collected_output(send: Callable[[list[pb.OutputLine]], object], origin: str) -> Iterator[JobOutput]:
    """Send what is printed and logged as warnings inside the ``with`` block; it also goes where it went before.

    Lines of C and C++ code, as of ``tf.print``, are only in the slot's own log.
    """
    output, root = JobOutput(send, origin), logging.getLogger()
    out: Any = _PrintedLines(sys.stdout, output)
    err: Any = _PrintedLines(sys.stderr, output)
    root.addHandler(output)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield output
    finally:
        root.removeHandler(output)
        output.flush()
