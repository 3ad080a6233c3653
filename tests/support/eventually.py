"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 60.0


def eventually(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> bool:
    """Return whether a condition comes true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
