"""Termination together with the parent process, however it ends; for processes that a launcher started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
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
    """The process that started this one and holds the other end of its standard input; a server ends with it.

    A process that the parent forked may keep standard input open after the parent's end. The end is then detected
    by the new parent process id.
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
