"""Importing large libraries quickly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Disable the garbage collector in the block, then freeze the survivors: later collections skip them.

    Imports create almost no garbage but many objects, which the collector traverses repeatedly. This takes a quarter of
    the time in which TensorFlow and Keras are imported.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()
