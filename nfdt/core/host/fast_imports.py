"""Importing large libraries quickly, and without the threads that they start."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ARROW_OPTIONS = "JE_ARROW_MALLOC_CONF"  # read by the jemalloc of pyarrow when it is loaded; the last value counts


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


@contextmanager
def without_allocator_threads() -> Iterator[None]:
    """Let pyarrow, which pandas imports, start no thread that gives unused memory back: no fork would follow then."""
    theirs = os.environ.get(_ARROW_OPTIONS)
    os.environ[_ARROW_OPTIONS] = ",".join(filter(None, [theirs, "background_thread:false"]))
    try:
        yield
    finally:
        if theirs is None:
            del os.environ[_ARROW_OPTIONS]
        else:
            os.environ[_ARROW_OPTIONS] = theirs
