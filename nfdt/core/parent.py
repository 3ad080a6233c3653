"""Ending with the parent process, however it went: called by processes that a launcher started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def die_with_parent(*, watch_stdin: bool = True) -> None:
    """End this process when its standard input closes; on Linux the kernel also kills it when its parent dies.

    The launcher holds the other end of standard input, a pipe, and starts all its children from one
    thread that lives as long as itself: the kernel counts the end of that thread as the parent's.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if watch_stdin:
        threading.Thread(target=_watch, name="parent", daemon=True).start()


def _watch() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
