"""Signals of a command: how it exits in order."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

from nfdt.core.errors import Terminated


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def end_on_sigterm() -> None:
    """Make SIGTERM an orderly exit that closes files and ends child processes."""
    signal.signal(signal.SIGTERM, _terminate)


def end_in_order() -> threading.Event:
    """Make the first SIGTERM set the event that is returned, and the second one an exit that ends child processes."""
    ending = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if ending.is_set():
            _terminate(number, frame)
        ending.set()

    signal.signal(signal.SIGTERM, end)
    return ending


def end_as_killed() -> None:
    """Make SIGTERM and SIGHUP an orderly exit with the exit code of a process killed by that signal.

    A second signal does not interrupt that exit.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _: FrameType | None) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise Terminated(128 + number)

    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, end)
