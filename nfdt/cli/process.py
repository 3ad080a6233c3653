"""Signals and standard error of a command: how it exits in order, and starts without the noise of libraries."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def quiet_start() -> Iterator[None]:
    """Hold back output to stderr inside the block, also from C++ code; show it if the block raises, or at level debug.

    TensorFlow 2.21 announces oneDNN on every import, regardless of TF_CPP_MIN_LOG_LEVEL.
    """
    if logging.getLogger().isEnabledFor(logging.DEBUG):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
