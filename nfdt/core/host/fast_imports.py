"""Importing large libraries quickly."""

from __future__ import annotations

import gc
import sys
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


@contextmanager
def not_importing(*names: str) -> Iterator[None]:
    """Let imports of these packages fail in the block, where they are optional; afterwards they can be imported.

    Args:
        *names: Packages; those that are loaded already stay.
    """
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: import raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
