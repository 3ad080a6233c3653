"""Signals and the main thread, which alone runs their handlers."""

from __future__ import annotations

import threading

WAKE_S = 1.0


def wait_in_main_thread(event: threading.Event) -> None:
    """Wait for an event, and run the handlers of signals within a second.

    A signal interrupts a wait of the main thread only if the kernel gives it to that thread. It may choose another
    thread, and then a wait without a limit would go on for ever.
    """
    while not event.wait(WAKE_S):
        pass
