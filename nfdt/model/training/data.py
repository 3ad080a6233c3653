"""Training data without Keras: ``.npy`` files, encoded batches, and batches of rows by index."""

from __future__ import annotations

import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import Array, RowSelection
from nfdt.core.arrays.pytree import KINDS, as_array, flatten_structure, rebuild
from nfdt.core.errors import ProtocolError, UsageError

_ALIGNMENT = 64
_LENGTH_BYTES = 8


def write_npy(file: BinaryIO, array: Any) -> None:
    """Write one array as ``.npy``, rows contiguous; never pickles."""
    np.lib.format.write_array(file, np.asarray(as_array(array), order="C"), allow_pickle=False)


def encode_npy(array: Any) -> bytes:
    """Return one array as the bytes of an ``.npy`` file."""
    buffer = io.BytesIO()
    write_npy(buffer, array)
    return buffer.getvalue()


def decode_npy(data: bytes | memoryview) -> Array:
    """Inverse of :func:`encode_npy`; a read-only view of ``data``.

    Raises:
        ProtocolError: the data is not ``.npy``, has an object dtype, or its size differs from the header.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        array = _view(memoryview(data)[file.tell() :], dtype, shape if not fortran else shape[::-1])
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"Array: expected an .npy file. Received something else: {error}") from None
    return array.T if fortran else array


def encode_batch(tree: Any) -> bytes:
    """Encode a pytree of arrays as one message: length of the header, JSON header, the arrays' memory, each aligned."""
    structure, arrays = flatten_structure(tree)
    described = [[array.dtype.str, list(array.shape)] for array in arrays]
    header = json.dumps({"structure": structure, "arrays": described}, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + _LENGTH_BYTES) % _ALIGNMENT)
    parts = [len(header).to_bytes(_LENGTH_BYTES, "little"), header]
    for array in arrays:
        parts.append(np.ascontiguousarray(array).tobytes())
        parts.append(bytes(-array.nbytes % _ALIGNMENT))
    return b"".join(parts)


def decode_batch(data: bytes | memoryview) -> Any:
    """Inverse of :func:`encode_batch`; the arrays are read-only views of ``data``.

    Raises:
        ProtocolError: the message is malformed, truncated, or has surplus bytes.
    """
    view = memoryview(data)
    start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(bytes(view[_LENGTH_BYTES:start]))
        structure, described = header["structure"], header["arrays"]
        arrays = []
        for name, shape in described:
            dtype = np.dtype(str(name))
            stop = start + _size(dtype, shape)
            arrays.append(_view(view[start:stop], dtype, tuple(shape)))
            start = stop + (start - stop) % _ALIGNMENT
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"Batch: expected an encoded batch. Received something else: {error}") from None
    if start != len(view):
        raise ProtocolError(f"Batch: expected {start} bytes. Received: {len(view)}.")
    return rebuild(structure, arrays)


def _size(dtype: np.dtype[Any], shape: Sequence[int]) -> int:
    if dtype.kind not in KINDS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"dtype {dtype}, shape {shape}")
    return dtype.itemsize * math.prod(shape)


def _view(memory: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if _size(dtype, shape) != len(memory):
        raise ValueError(f"{dtype} of shape {shape} needs {_size(dtype, shape)} bytes, there are {len(memory)}")
    if not len(memory):
        return np.empty(shape, dtype)
    return np.frombuffer(memory, dtype).reshape(shape)


@runtime_checkable
class RowArray(Protocol):
    """An array whose rows are on another machine."""

    shape: tuple[int, ...]
    ndim: int

    def take(self, rows: RowSelection) -> Array:
        """Return these rows."""
        ...

    def prefetch(self, batches: Sequence[RowSelection]) -> None:
        """Fetch the rows of these batches in the background."""
        ...


def count_rows(arrays: Sequence[Array | RowArray]) -> int:
    """Return the number of rows (samples) that all arrays have in common.

    Raises:
        UsageError: there are no arrays, some are scalars, or the numbers of rows differ.
    """
    rows = sorted({array.shape[0] if array.ndim else -1 for array in arrays})
    if len(rows) != 1 or rows[0] < 0:
        shapes = ", ".join(str(array.shape) for array in arrays) or "no arrays"
        raise UsageError(f"Data: expected arrays with one and the same number of rows. Received: {shapes}.")
    return rows[0]


class BatchSource(ABC):
    """Batches by the rows of the coordinator's plan.

    Attributes:
        whole: Whether a row is a whole batch; otherwise it is a sample.
    """

    whole: bool

    @abstractmethod
    def batch(self, rows: RowSelection) -> Any:
        """Return the pytree of these rows."""

    def prefetch(self, rows: Sequence[RowSelection]) -> None:
        """Prepare the batches of these rows, which are needed next in this order; discard all others."""
        return

    def begin_epoch(self, epoch: int, first: int) -> None:
        """Begin an epoch; epochs count from ``first``."""
        return

    def end_epoch(self) -> None:
        """End the epoch that has begun, if it has not ended."""
        return


class ArraySource(BatchSource):
    """Rows of a pytree of arrays, the same in every epoch.

    Args:
        structure: Structure of the pytree, see :mod:`nfdt.core.arrays.pytree`.
        arrays: Arrays of the pytree, usually memory-mapped and read only, or rows that are fetched.

    Raises:
        UsageError: the arrays differ in their number of rows.
    """

    whole = False

    def __init__(self, structure: Any, arrays: Sequence[Array | RowArray]) -> None:
        self._structure = structure
        self._arrays = [array if isinstance(array, RowArray) else np.asarray(array) for array in arrays]
        self.samples = count_rows(self._arrays)
        rebuild(structure, self._arrays)

    def batch(self, rows: RowSelection) -> Any:
        """Return the pytree of these rows: views where they are consecutive, else one gather per array."""
        if not isinstance(rows, slice):
            rows = _as_slice(np.asarray(rows, np.int64))
        return rebuild(self._structure, [_take(array, rows) for array in self._arrays])

    def prefetch(self, rows: Sequence[RowSelection]) -> None:
        """Fetch these rows of arrays that are elsewhere."""
        for array in self._arrays:
            if isinstance(array, RowArray):
                array.prefetch(rows)


def _take(array: Array | RowArray, rows: RowSelection) -> Array:
    if isinstance(array, RowArray):
        return array.take(rows)
    return array[rows] if isinstance(rows, slice) else np.take(array, rows, axis=0)


def _as_slice(rows: npt.NDArray[np.int64]) -> RowSelection:
    consecutive = rows.size > 0 and rows[0] >= 0 and bool(np.all(np.diff(rows) == 1))
    return slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows
