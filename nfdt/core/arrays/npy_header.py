"""Header of an ``.npy`` file, read from its first bytes."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

HEADER_BYTES = 4096


@dataclass(frozen=True)
class NpyHeader:
    """Shape, dtype and place of an array's elements in an ``.npy`` file.

    Attributes:
        offset: First byte of the elements.
        row_bytes: Bytes of one row.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def read_header(start: bytes, size: int) -> NpyHeader | None:
    """Return the header of a file of ``size`` bytes; None unless it is an array with rows one after the other.

    Args:
        start: First bytes of the file, :data:`HEADER_BYTES` of them or all.
        size: Bytes of the whole file.
    """
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, TypeError):
        return None
    header = NpyHeader(tuple(map(int, shape)), dtype, file.tell())
    rowed = bool(shape) and not dtype.hasobject and not (fortran and len(shape) > 1)
    return header if rowed and header.offset + shape[0] * header.row_bytes == size else None
