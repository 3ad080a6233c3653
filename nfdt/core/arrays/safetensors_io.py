"""Named arrays as safetensors: the only format in which arrays are stored and sent by name.

A large file is never held as a whole: it is written from the memory of its arrays, and read as views of a mapping.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from nfdt.core.arrays.layout import MAX_VARIABLES, Array
from nfdt.core.errors import ProtocolError

MAX_HEADER_BYTES = 2**27
PREFIX_BYTES = 8  # of the header's length

_KINDS = {"b": "BOOL", "i": "I", "u": "U", "f": "F", "c": "C"}  # safetensors' names; all but BOOL get the bits appended
_DTYPES = {
    "BOOL" if kind == "b" else f"{_KINDS[kind]}{8 * size}": np.dtype(f"<{kind}{size}")
    for kind, sizes in (("b", [1]), ("i", [1, 2, 4, 8]), ("u", [1, 2, 4, 8]), ("f", [2, 4, 8]), ("c", [8]))
    for size in sizes
}


@dataclass(frozen=True)
class ArrayEntry:
    """Array in safetensors: its dtype and shape, and the place of its first byte behind the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int = 0

    @property
    def stop(self) -> int:
        """Place behind its last byte."""
        return self.start + self.nbytes

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Pieces:
    """Array whose elements lie in several arrays, one behind the other, all contiguous and of its dtype.

    The arrays may be made while they are read; then they are read once.
    """

    entry: ArrayEntry
    arrays: Iterable[Array]

    def joined(self) -> Array:
        """Return the array as a whole."""
        return np.concatenate([array.reshape(-1) for array in self.arrays]).reshape(self.entry.shape)

    def write_to(self, out: Array) -> None:
        """Write the array to another one of its shape and dtype."""
        np.concatenate([array.reshape(-1) for array in self.arrays], out=out.reshape(-1))

    @classmethod
    def of(cls, array: Any) -> Pieces:
        """Return an array in one piece, in a form that can be stored."""
        kept = storable(array)
        return cls(ArrayEntry(kept.dtype, kept.shape), [kept])

    @classmethod
    def flat(cls, arrays: Sequence[Any]) -> Pieces:
        """Return the elements of all arrays as one vector of float32; arrays of another dtype are converted."""
        kept = [storable(np.asarray(array).astype(np.float32, copy=False)) for array in arrays]
        return cls(ArrayEntry(np.dtype("<f4"), (sum(array.size for array in kept),)), kept)


def storable(array: Any) -> Array:
    """Return ``array`` as contiguous, little-endian memory; dtypes unknown to NumPy (bfloat16) become float32.

    The shape is kept, also that of a scalar, and float32 represents every bfloat16 exactly.
    """
    value = np.asarray(array)
    if value.dtype.kind not in "biufc" or value.dtype.itemsize > 8:
        value = value.astype(np.float32)
    return np.require(value.astype(value.dtype.newbyteorder("<"), copy=False), requirements="C").reshape(value.shape)


def dump_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Encode named arrays as safetensors; inverse of :func:`load_arrays`."""
    return bytes(save({name: storable(array) for name, array in arrays.items()}))


def dump_parts(arrays: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return the bytes of :func:`dump_arrays` in parts; see :func:`stream_parts`."""
    return list(stream_parts(arrays)[1])


def stream_parts(arrays: Mapping[str, Any]) -> tuple[int, Iterator[bytes | memoryview]]:
    """Return the number of the bytes of :func:`dump_arrays`, and the bytes in parts.

    These are the memory of the arrays themselves where possible. A value may be :class:`Pieces` of an array.
    """
    header, ordered = arrange(arrays)
    size = len(header) + sum(pieces.entry.nbytes for pieces in ordered.values())
    return size, itertools.chain([header], itertools.chain.from_iterable(map(contents, ordered.values())))


def arrange(arrays: Mapping[str, Any]) -> tuple[bytes, dict[str, Pieces]]:
    """Return the header of :func:`stream_parts`, and the arrays in the order of their bytes."""
    kept = {name: array if isinstance(array, Pieces) else Pieces.of(array) for name, array in arrays.items()}
    header, entries = dump_header({name: pieces.entry for name, pieces in kept.items()})
    return header, {name: kept[name] for name in entries}


def contents(pieces: Pieces) -> Iterator[memoryview]:
    """Yield the bytes of an array in pieces."""
    return (bytes_of(array) for array in pieces.arrays if array.nbytes)


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data


def write_all(file: int, data: bytes | memoryview, position: int) -> None:
    """Write all bytes at a position of a file, given its descriptor."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written


def dump_header(arrays: Mapping[str, ArrayEntry]) -> tuple[bytes, dict[str, ArrayEntry]]:
    """Return the header of safetensors with these arrays, and their entries in the order of their aligned bytes."""
    header, entries, at = dict[str, Any](), dict[str, ArrayEntry](), 0
    for name, array in sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
        entries[name] = entry = ArrayEntry(array.dtype, array.shape, at)
        kind, at = array.dtype.kind, entry.stop
        dtype = _KINDS[kind] if kind == "b" else f"{_KINDS[kind]}{8 * array.dtype.itemsize}"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [entry.start, entry.stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text, entries


def header_bytes(prefix: bytes | memoryview) -> int:
    """Return the size of the header, with the prefix that states it.

    Raises:
        ProtocolError: the prefix is too short, or the header too long.
    """
    size = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if len(prefix) < PREFIX_BYTES or size > MAX_HEADER_BYTES:
        raise ProtocolError(f"Arrays: expected safetensors. Received: {len(prefix)} bytes, a header of {size}.")
    return PREFIX_BYTES + size


def read_header(header: bytes | memoryview) -> dict[str, ArrayEntry]:
    """Return the arrays of safetensors in the order of their bytes, one behind the other; ``header`` is the whole one.

    Raises:
        ProtocolError: it is no header, has an unknown dtype, or more than twice ``MAX_VARIABLES`` arrays.
    """
    try:
        found = json.loads(bytes(header[PREFIX_BYTES:]))
        found.pop("__metadata__", None)
        entries = {name: _entry(value) for name, value in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"Arrays: expected safetensors. Received something else: {error!r}") from None
    if len(entries) > 2 * MAX_VARIABLES:
        raise ProtocolError(f"Arrays: expected at most {2 * MAX_VARIABLES} arrays. Received: {len(entries)}.")
    entries, at = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))), 0
    for name, entry in entries.items():
        if entry.start != at:
            raise ProtocolError(f"Arrays: expected {name[:80]!r} at byte {at}. Received: at byte {entry.start}.")
        at = entry.stop
    return entries


def _entry(value: Mapping[str, Any]) -> ArrayEntry:
    shape, (start, stop) = tuple(map(int, value["shape"])), map(int, value["data_offsets"])
    entry = ArrayEntry(_DTYPES[value["dtype"]], shape, start)
    if min(shape, default=0) < 0 or entry.stop != stop:
        raise ValueError(f"{entry.dtype} of shape {shape} in {stop - start} bytes")
    return entry


def size_of(entries: Iterable[ArrayEntry]) -> int:
    """Return the number of bytes behind the header."""
    return max((entry.stop for entry in entries), default=0)


def load_arrays(source: bytes | memoryview | mmap.mmap | Path) -> dict[str, Array]:
    """Return named arrays from safetensors, as views: read-only ones of bytes, and of a file, which is mapped.

    Raises:
        ProtocolError: the source is not safetensors, has an unknown dtype, or more than twice ``MAX_VARIABLES`` arrays.
    """
    data = mapped(source) if isinstance(source, Path) else memoryview(source)
    begin = header_bytes(data)
    entries = read_header(data[:begin])
    if begin + size_of(entries.values()) != len(data):
        raise ProtocolError(f"Arrays: expected {begin + size_of(entries.values())} bytes. Received: {len(data)}.")
    return {
        name: np.frombuffer(data, entry.dtype, math.prod(entry.shape), begin + entry.start).reshape(entry.shape)
        if entry.stop > entry.start
        else np.zeros(entry.shape, entry.dtype)
        for name, entry in entries.items()
    }


class ArrayRanges:
    """File of safetensors of which only ranges are read.

    Args:
        read: Returns the bytes of some (offset, length) ranges of the file, one after the other.

    Attributes:
        read: As given.
        begin: Size of the header, behind which the entries count.
        entries: The arrays by name.

    Raises:
        ProtocolError: the file is no safetensors.
    """

    def __init__(self, read: Callable[[Sequence[tuple[int, int]]], bytes]) -> None:
        self.read = read
        self.begin = header_bytes(read([(0, PREFIX_BYTES)]))
        self.entries = read_header(read([(0, self.begin)]))

    def elements(self, name: str, start: int, stop: int) -> Array:
        """Return elements of an array, flat."""
        entry = self.entries[name]
        size = entry.dtype.itemsize
        offset = self.begin + entry.start + size * start
        return np.frombuffer(self.read([(offset, size * (stop - start))]), entry.dtype)


def give_back(array: Array) -> None:
    """Give back the memory of a view of a mapped file; its pages are read again where they are used again.

    Other arrays are left alone.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapping = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapping, mmap.mmap) or not array.nbytes:
        return
    start = array.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    begin = start - start % mmap.PAGESIZE
    mapping.madvise(mmap.MADV_DONTNEED, begin, start + array.nbytes - begin)


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file without reading them into memory; the file must not change."""
    with path.open("rb") as file:
        empty = not os.fstat(file.fileno()).st_size
        return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
