"""Rows of an array on the server: fetched on demand or ahead of the training, and kept while there is room."""

from __future__ import annotations

import io
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import Array, RowSelection

logger = logging.getLogger(__name__)

Fetch = Callable[[list[tuple[int, int]]], Iterator[bytes]]
"""Returns the bytes of some (offset, length) ranges of the artifact, one after the other, in pieces of any size."""

MAX_RANGES = 32768  # of one call
MAX_CALL_BYTES = 128 * 2**20
PIECE_ROWS = 4096
PIECE_BYTES = 16 * 2**20
ARRIVAL_S = 600.0
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


class RemoteRows:
    """An array whose rows are fetched by index.

    Args:
        header: Header of the ``.npy`` file.
        fetch: Fetches ranges of it.
        keep_bytes: Memory for rows that are kept; the oldest make room for new ones.

    Attributes:
        shape: Shape of the array.
        ndim: Number of its axes.
    """

    def __init__(self, header: NpyHeader, fetch: Fetch, keep_bytes: int) -> None:
        self._header, self._fetch = header, fetch
        self.shape, self.ndim = header.shape, len(header.shape)
        room = max(1, min(self.shape[0], keep_bytes // max(1, header.row_bytes)))
        self._kept = np.empty((room, *self.shape[1:]), header.dtype)  # pages are allocated as rows arrive
        self._row_in = np.full(room, -1, np.int64)
        self._place_of = np.full(self.shape[0], -1, np.int64)
        self._coming = np.zeros(self.shape[0], bool)
        self._next = 0
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")

    def take(self, rows: RowSelection) -> Array:
        """Return these rows, as a copy.

        Raises:
            NfdtError: they cannot be fetched.
        """
        numbers = self._numbers(rows)
        with self._changed:
            self._changed.wait_for(lambda: not self._coming[numbers].any(), ARRIVAL_S)
            places = self._place_of[numbers]
            if (places >= 0).all():
                return self._kept[places]
        return self._fetched(numbers)

    def prefetch(self, batches: Sequence[RowSelection]) -> None:
        """Fetch the rows of these batches in the background, in this order, as far as half of the room suffices."""
        wanted, room = [], len(self._row_in) // 2
        with self._changed:
            for rows in batches:
                numbers = self._numbers(rows)
                missing = np.unique(numbers[(self._place_of[numbers] < 0) & ~self._coming[numbers]])
                room -= len(missing)
                if room < 0:
                    break
                self._coming[missing] = True
                wanted += self._pieces(missing)
        for group in _calls(wanted):
            self._thread.submit(self._receive_quietly, group)

    def _numbers(self, rows: RowSelection) -> npt.NDArray[np.int64]:
        return np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else np.asarray(rows, np.int64)

    def _pieces(self, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        most = max(1, min(PIECE_ROWS, PIECE_BYTES // max(1, self._header.row_bytes)))
        return [rows[at : at + most] for at in range(0, len(rows), most)]

    def _fetched(self, numbers: npt.NDArray[np.int64]) -> Array:
        """Fetch rows now and return them, whether or not there is room for all."""
        distinct, inverse = np.unique(numbers, return_inverse=True)
        parts = [part for group in _calls(self._pieces(distinct)) for part in self._receive(group)]
        return np.concatenate(parts)[inverse] if parts else np.empty((0, *self.shape[1:]), self._header.dtype)

    def _receive_quietly(self, pieces: list[npt.NDArray[np.int64]]) -> None:
        """Receive rows in the background; after an error, :meth:`take` fetches the missing rows itself, and raises."""
        try:
            for _ in self._receive(pieces):
                pass
        except Exception as error:
            logger.info("rows could not be fetched ahead: %s", error)
        finally:
            with self._changed:
                for piece in pieces:
                    self._coming[piece] = False
                self._changed.notify_all()

    def _receive(self, pieces: list[npt.NDArray[np.int64]]) -> Iterator[Array]:
        """Fetch pieces with one call; yield and keep the rows of each as soon as they are complete."""
        stream = self._fetch([block for piece in pieces for block in self._blocks(piece)])
        arrived = bytearray()
        for piece in pieces:
            size = len(piece) * self._header.row_bytes
            while len(arrived) < size:
                arrived += next(stream)
            values = np.frombuffer(bytes(arrived[:size]), self._header.dtype).reshape(len(piece), *self.shape[1:])
            del arrived[:size]
            self._keep(piece, values)
            yield values

    def _blocks(self, rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the ranges of ascending rows; neighbours are one range."""
        width, begin = self._header.row_bytes, self._header.offset
        borders = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = np.split(rows, borders)
        return [(begin + int(run[0]) * width, len(run) * width) for run in runs if len(run)]

    def _keep(self, rows: npt.NDArray[np.int64], values: Array) -> None:
        with self._changed:
            new = self._place_of[rows] < 0
            fresh, count = rows[new][-len(self._row_in) :], len(self._row_in)
            places = (self._next + np.arange(len(fresh))) % count
            replaced = self._row_in[places]
            self._place_of[replaced[replaced >= 0]] = -1
            self._kept[places] = values[new][-count:]
            self._row_in[places], self._place_of[fresh] = fresh, places
            self._next = int((self._next + len(fresh)) % count)
            self._coming[rows] = False
            self._changed.notify_all()


def _calls(pieces: list[npt.NDArray[np.int64]]) -> list[list[npt.NDArray[np.int64]]]:
    """Group pieces so that a call has at most MAX_RANGES ranges and MAX_CALL_BYTES bytes."""
    most = min(MAX_RANGES // PIECE_ROWS, MAX_CALL_BYTES // PIECE_BYTES)
    return [pieces[at : at + most] for at in range(0, len(pieces), most)]
