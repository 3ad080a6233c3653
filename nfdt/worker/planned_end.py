"""Planned end of a slot's process: the request for it, and the time that is left.

The request comes as SIGTERM, or from the launcher as input (see :mod:`nfdt.core.host.child_process`).
A scheduler may send SIGTERM to the launcher and to the slot: only the slot's second SIGTERM ends it at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from nfdt.core.work.slot_connection import GRACE_S

logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM  # of a process that did not end in order


class PlannedEnd:
    """Request to end this process in order; its grace begins with the request, and the process ends with it.

    Args:
        grace_s: The grace in seconds.

    Attributes:
        grace_s: The grace in seconds.
        requested: Event that is set by the request.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.grace_s, self.requested = grace_s, threading.Event()
        self._lock = threading.Lock()
        self._act: Callable[[], None] | None = None

    def call_on_request(self, act: Callable[[], None]) -> None:
        """Call a function once after the request, on its thread, or now if there has been one."""
        with self._lock:
            self._act = act
            late = self.requested.is_set()
        if late:
            act()

    def request(self) -> None:
        """Request the end; a second request does nothing. Any thread may call."""
        with self._lock:
            if self.requested.is_set():
                return
            self.requested.set()
            act = self._act
        logger.info("this process shall end within %g s", self.grace_s)
        timer = threading.Timer(self.grace_s, self.now, (f"it did not end in order within {self.grace_s:g} s",))
        timer.daemon = True
        timer.start()
        if act is not None:
            act()

    def now(self, reason: str) -> None:
        """End this process."""
        logger.warning("this process ends now: %s", reason)
        logging.shutdown()
        os._exit(EXIT_CODE)

    def watch_sigterm(self) -> None:
        """Take SIGTERM as the request, and a second one as the end, unless it is ignored. For the main thread.

        A thread of its own takes them: the main thread may be in the middle of a long computation.
        """
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._take_signals, args=(reader, writer), name="signals", daemon=True).start()

    def _take_signals(self, reader: socket.socket, _writer: socket.socket) -> None:
        """Take the numbers of signals, which the interpreter writes to the socket ``_writer``."""
        received = 0
        while numbers := reader.recv(64):
            for _ in range(numbers.count(signal.SIGTERM)):
                received += 1
                if received > 1:
                    self.now("it received a second SIGTERM")
                self.request()
