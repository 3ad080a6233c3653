"""Memory for float32 vectors: aligned, and used again, as newly allocated memory is slow."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 64


def aligned_buffer(size: int) -> npt.NDArray[np.float32]:
    """Return an uninitialised float32 vector that TensorFlow can use without a copy."""
    raw = np.empty(size * 4 + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size * 4].view(np.float32)


def sum_of_squares(vector: npt.NDArray[np.float32]) -> float:
    """Return the squared Euclidean norm; not finite if an element is not, or if its square overflows float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.dot(vector, vector))


def length_of(vector: npt.NDArray[np.float32]) -> float:
    """Return the Euclidean norm; not finite where :func:`sum_of_squares` is not."""
    return math.sqrt(sum_of_squares(vector))


class BufferPool:
    """Pool of aligned buffers of one size; a few are kept. Thread-safe."""

    def __init__(self, size: int, keep: int = 2) -> None:
        self._size = size
        self._keep = keep
        self._free: list[npt.NDArray[np.float32]] = []

    @contextmanager
    def lend(self) -> Iterator[npt.NDArray[np.float32]]:
        """Lend a buffer for the block; its content is lost afterwards."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = aligned_buffer(self._size)
        try:
            yield buffer
        finally:
            if len(self._free) < self._keep:
                self._free.append(buffer)


class VectorPool:
    """Vectors of one size and type whose memory is used again when neither they nor views of them are left.

    Thread-safe.

    Args:
        size: Number of elements.
        dtype: Their type.
        keep: Number of unused memory areas that are kept.
    """

    def __init__(self, size: int, dtype: Any = np.float32, keep: int = 4) -> None:
        self._size, self._dtype, self._keep = size, np.dtype(dtype), keep
        self._free: list[mmap.mmap] = []

    def new_vector(self) -> npt.NDArray[Any]:
        """Return an uninitialised vector."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _new_memory(max(self._size * self._dtype.itemsize, 1))
        vector = np.frombuffer(memory, self._dtype, self._size)
        weakref.finalize(vector, self._keep_memory, memory).atexit = False
        return vector

    def _keep_memory(self, memory: mmap.mmap) -> None:
        if len(self._free) < self._keep:
            self._free.append(memory)


def _new_memory(size: int) -> mmap.mmap:
    """Return private memory in huge pages where the system has them, which a loop over several vectors reads faster."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
