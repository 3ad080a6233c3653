"""The owner's side of a process that a fork server has forked."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time

NOT_FORKED = 1


class ForkedProcess:
    """Child of a fork server, with the part of ``subprocess.Popen`` that the owner of a process uses.

    For one thread at a time.

    Args:
        report: Socket over which the fork server reports process id and exit code.
        stdin: Descriptor of the other end of its standard input.
        name: Name of the process in errors.

    Attributes:
        pid: Identifier of the process; None until it exists.
        stdin: Other end of its standard input.
        returncode: Exit code as in Popen; None while it runs. -SIGKILL for processes that ended with their fork server,
            ``NOT_FORKED`` for those that it never forked.
    """

    def __init__(self, report: socket.socket, stdin: int, name: str) -> None:
        self._name = name
        self.pid: int | None = None
        self.stdin = os.fdopen(stdin, "wb", 0)
        self.returncode: int | None = None
        self._report = report

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs or is yet to be forked."""
        with contextlib.suppress(BlockingIOError):
            while self.returncode is None:
                self._take(self._report.recv(64, socket.MSG_DONTWAIT))
        return self.returncode

    def _take(self, message: bytes) -> None:
        if not message:
            self._close(NOT_FORKED if self.pid is None else -signal.SIGKILL)
        elif self.pid is not None:
            self._close(int(message))
        else:
            self.pid = int(message) or None
            if self.pid is None:
                self._close(NOT_FORKED)

    def _close(self, returncode: int) -> None:
        self.returncode = returncode
        self._report.close()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: The process runs for longer than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
            self._await_report(left)
        return code

    def await_fork(self, timeout_s: float) -> int | None:
        """Wait until the process exists and return its id; None if it was not forked within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None and self.pid is None and (left := deadline - time.monotonic()) > 0:
            self._await_report(left)
        return self.pid

    def _await_report(self, timeout_s: float | None) -> None:
        reports = select.poll()
        reports.register(self._report, select.POLLIN)
        reports.poll(None if timeout_s is None else timeout_s * 1000)

    def terminate(self) -> None:
        """Send SIGTERM; a process that is yet to be forked counts as ended."""
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; a process that is yet to be forked counts as ended."""
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            if self.pid is None:
                self._close(-number)
            else:
                with contextlib.suppress(ProcessLookupError):  # it ended with its fork server just now
                    os.kill(self.pid, number)
