"""Child processes: they end with their parent, and a fork server starts them for their owner, who watches them here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(*, watch_stdin: bool = True, on_input: Callable[[], object] = lambda: None) -> None:
    """End this process when its standard input closes; on Linux the kernel also kills it when its parent dies.

    ``on_input`` is called when something arrives there, on another thread.

    The launcher holds the other end of standard input, a pipe. It starts all its children from one
    thread that lives as long as itself, because the kernel treats the end of that thread as the parent's end.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if watch_stdin:
        threading.Thread(target=_watch, args=(on_input,), name="parent", daemon=True).start()


def _watch(on_input: Callable[[], object]) -> None:
    _read_to_end(on_input)
    os._exit(0)


def _read_to_end(on_input: Callable[[], object] = lambda: None) -> None:
    """Block until standard input ends or cannot be read."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            on_input()


class Parent:
    """The process that started this one and holds the other end of its standard input.

    Another child of the parent may have inherited that end and keep it open. A changed parent process id shows the
    parent's end too.
    """

    def __init__(self) -> None:
        self._pid = os.getppid()
        self._ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name="parent", daemon=True)

    def wait(self, timeout_s: float) -> None:
        """Block until standard input ends, for ``timeout_s`` at most; no other code may read it from now on."""
        if self._reader.ident is None:
            self._reader.start()
        self._ended.wait(timeout_s)

    @property
    def is_gone(self) -> bool:
        """Whether the parent has ended, or has closed standard input to end this process."""
        return self._ended.is_set() or os.getppid() != self._pid

    def _read(self) -> None:
        try:
            _read_to_end()
        finally:
            self._ended.set()


NOT_FORKED = 1


class ForkedProcess:
    """Child of a fork server, with those parts of the interface of ``subprocess.Popen`` that its owner uses.

    Not safe for several threads.

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
                self._read_report(self._report.recv(64, socket.MSG_DONTWAIT))
        return self.returncode

    def _read_report(self, message: bytes) -> None:
        if not message:  # the fork server has ended, and its children with it
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
