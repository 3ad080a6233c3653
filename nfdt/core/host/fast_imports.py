"""Importing large libraries quickly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collect no garbage inside the block, nor ever look again at what lives at its end.

    Imports leave next to no garbage but many objects, which the collector goes through time and again: a quarter of
    the seconds that TensorFlow and Keras take.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()
