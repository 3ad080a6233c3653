"""Waits of the main thread, with signals that come to other threads."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import signal, sys, threading
from nfdt.core.host.signals import wait_in_main_thread

class Announced(threading.Event):
    def wait(self, timeout=None):
        waits.set()
        return super().wait(timeout)

def send():
    waits.wait()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

waits = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
threading.Thread(target=send, daemon=True).start()
wait_in_main_thread(Announced())
"""


def test_a_signal_that_another_thread_receives_is_handled():
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=60).returncode == 7
