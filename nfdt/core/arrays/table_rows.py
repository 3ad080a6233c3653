"""Flat vectors with only some rows of their tables (embeddings): those that a step touched, or that changed."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import ParameterLayout, Run
from nfdt.core.errors import ProtocolError, ShapeMismatch

Vector = npt.NDArray[np.float32]
Payload = npt.NDArray[np.uint8]
RowIndex = npt.NDArray[np.int32]
"""Row numbers of a table, ascending, without repetition."""

_FLOAT32 = np.dtype("<f4")
_INT32 = np.dtype("<i4")

MIN_TABLE_SIZE = 2**16
"""Elements of the smallest table that is exchanged by rows."""

LONG_RUN = 16
LEAST_MAPPED_BYTES = 2**22


def sparse_zeros(shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Return zeros of which only those pages take memory that are written to.

    Large arrays of NumPy have huge pages, so that a row would take 2 MiB.
    """
    size = int(np.prod(shape))
    if size * np.dtype(dtype).itemsize < LEAST_MAPPED_BYTES:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size * np.dtype(dtype).itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, size).reshape(shape)


@dataclass(frozen=True)
class Rows:
    """Some rows of a table.

    Attributes:
        index: Row numbers, ascending, shape ``(k,)``, int32.
        values: Values of the rows, shape ``(k, width)``, float32.
    """

    index: npt.NDArray[np.int32]
    values: Vector

    @classmethod
    def summed(cls, index: npt.NDArray[Any], values: Vector) -> Rows:
        """Return rows from any order, shapes ``(k,)`` and ``(k, width)``: equal indices summed, zero rows left out."""
        order = np.argsort(index, kind="stable")
        index, values = np.asarray(index, np.int32)[order], values[order]
        starts = np.flatnonzero(np.r_[True, index[1:] != index[:-1]]) if index.size else np.zeros(0, np.intp)
        if starts.size < index.size:
            index, values = index[starts], _added(values, starts)
        touched = values.any(axis=1)
        return cls(index, values) if touched.all() else cls(index[touched], values[touched])

    def within(self, first: int, stop: int) -> Rows:
        """Return the rows from ``first`` up to ``stop``, exclusive, numbered from ``first``."""
        begin, end = np.searchsorted(self.index, (first, stop))
        return Rows(self.index[begin:end] - np.int32(first), self.values[begin:end])


@dataclass(frozen=True)
class RowVector:
    """A flat vector whose missing table rows are zero, or unchanged.

    Attributes:
        dense: All elements outside the tables, in order, float32.
        rows: Rows of each table.
    """

    dense: Vector
    rows: tuple[Rows, ...]

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return bool(np.isfinite(self.dense).all()) and all(bool(np.isfinite(r.values).all()) for r in self.rows)

    def filled_with_nan(self) -> RowVector:
        """Return the same rows with NaN for every element."""
        rows = tuple(Rows(r.index, np.full_like(r.values, np.nan)) for r in self.rows)
        return RowVector(np.full_like(self.dense, np.nan), rows)


@dataclass(frozen=True)
class ChangedRows:
    """New values in a table.

    Attributes:
        table: Index of the table among the tables.
        first: Number of the row from which rows are counted.
        rows: Some rows, or consecutive rows from ``first`` on, shape ``(k, width)``.
    """

    table: int
    first: int
    rows: Rows | Vector


class RowWeights:
    """Weights for a step: all dense elements, and the changes of the tables since the last :meth:`pop_changes`.

    Args:
        dense: All elements outside the tables.
        news: Changes, oldest first; the list is shared with the code that adds to it.
    """

    def __init__(self, dense: Vector, news: list[ChangedRows]) -> None:
        self.dense = dense
        self._news = news

    def pop_changes(self) -> list[ChangedRows]:
        """Return the changes since the last call, to be applied in this order."""
        changes = list(self._news)
        self._news.clear()
        return changes


@dataclass(frozen=True)
class Table:
    """Position of a table in a flat vector, in elements, and its shape."""

    start: int
    rows: int
    width: int

    @property
    def stop(self) -> int:
        """End of the table in the flat vector, exclusive."""
        return self.start + self.rows * self.width

    def checked_count(self, payload: Payload) -> int:
        """Return a number of rows from 4 bytes of another process, at most that of the table."""
        count = int(payload.view(_INT32)[0])
        if not 0 <= count <= self.rows:
            raise ProtocolError(f"Rows: expected at most {self.rows} of a table. Received: {count}.")
        return count

    def checked_numbers(self, payload: Payload) -> npt.NDArray[np.int32]:
        """Return a copy of row numbers from bytes of another process: ascending, and all of the table."""
        index = payload.view(_INT32).copy()  # the checked values cannot change
        if index.size and (index[0] < 0 or index[-1] >= self.rows or (index[1:] <= index[:-1]).any()):
            raise ProtocolError(f"Rows: expected rising numbers below {self.rows}. Received others.")
        return index


@dataclass(frozen=True)
class TableLayout:
    """Layout of a flat vector of ``size`` elements: tables, in order, and the remaining dense elements."""

    size: int
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, layout: ParameterLayout, tables: Sequence[int]) -> TableLayout:
        """Return the layout of a whole model; ``tables`` are the indices of variables of rank 2."""
        slots = [layout.slots[index] for index in tables]
        return cls(layout.size, tuple(Table(slot.start, *slot.shape) for slot in slots))

    @classmethod
    def of_run(cls, run: Run, tables: Sequence[int]) -> TableLayout:
        """Return the layout of one shard's run; a run that ends inside a table ends between two of its rows."""
        pieces = [piece for piece in run.pieces if piece.variable in tables]
        starts = [piece.slot.start + piece.start - run.start for piece in pieces]
        return cls(run.size, tuple(Table(start, *p.shape) for start, p in zip(starts, pieces, strict=True)))

    @property
    def dense_size(self) -> int:
        """Number of elements outside the tables."""
        return self.size - sum(table.stop - table.start for table in self.tables)

    @property
    def payload_bytes(self) -> int:
        """Largest number of bytes that :meth:`encode` returns."""
        return 4 * self.size + 4 * sum(1 + table.rows for table in self.tables)

    def dense(self, flat: Vector) -> Vector:
        """Return a copy of the elements outside the tables."""
        return np.concatenate([flat[start:stop] for start, stop in self._between()])

    def views(self, flat: Vector) -> list[Vector]:
        """Return the tables as views of ``flat``."""
        return [flat[table.start : table.stop].reshape(table.rows, table.width) for table in self.tables]

    def join(self, dense: Vector, tables: Sequence[Vector]) -> Vector:
        """Assemble a new flat vector from its dense elements and its tables."""
        flat = np.empty(self.size, np.float32)
        taken = at = 0
        for table, values in zip(self.tables, tables, strict=True):
            flat[at : table.start] = dense[taken : taken + table.start - at]
            taken, at = taken + table.start - at, table.stop
            flat[table.start : table.stop] = values.reshape(-1)
        flat[at:] = dense[taken:]
        return flat

    def spread(self, others: Vector) -> Vector:
        """Return a new flat vector with these elements outside the tables; the tables are zeros, without memory yet."""
        flat, taken = sparse_zeros(self.size), 0
        for start, stop in self._between():
            flat[start:stop] = others[taken : taken + stop - start]
            taken += stop - start
        return flat

    def without(self, tables: Collection[int]) -> TableLayout:
        """Return the layout of the vector without some of its tables, by index."""
        kept, lacking = [], 0
        for index, table in enumerate(self.tables):
            if index in tables:
                lacking += table.stop - table.start
            else:
                kept.append(Table(table.start - lacking, table.rows, table.width))
        return TableLayout(self.size - lacking, tuple(kept))

    def _between(self) -> list[tuple[int, int]]:
        """Return start and end of each stretch outside the tables: one before each table, and one behind the last."""
        ends = [0, *(end for table in self.tables for end in (table.start, table.stop)), self.size]
        return list(zip(ends[::2], ends[1::2], strict=True))

    def pieces(self, dense: Vector, tables: Sequence[Iterable[Vector]]) -> Iterator[Vector]:
        """Yield the flat vector in pieces, given its dense elements, and the pieces of each table."""
        taken = 0
        for (start, stop), rows in zip(self._between(), [*tables, ()], strict=True):
            yield dense[taken : taken + stop - start]
            taken += stop - start
            yield from rows

    def touched(self, flat: Vector) -> RowVector:
        """Return a vector whose tables are given by their nonzero rows."""
        rows = [Rows.summed(np.arange(len(table), dtype=np.int32), table) for table in self.views(flat)]
        return RowVector(self.dense(flat), tuple(rows))

    def encode(self, vector: RowVector) -> Payload:
        """Encode as little-endian bytes: the dense part; for each table the number of rows (int32), index, values."""
        parts = [np.asarray(vector.dense, _FLOAT32)]
        for rows in vector.rows:
            parts.append(np.array([rows.index.size], _INT32).view(_FLOAT32))
            parts.append(np.ascontiguousarray(rows.index, _INT32).view(_FLOAT32))
            parts.append(np.asarray(rows.values, _FLOAT32).reshape(-1))
        return np.concatenate(parts).view(np.uint8)

    def decode(self, payload: Payload) -> RowVector:
        """Inverse of :meth:`encode`, for bytes from another process; views of ``payload``.

        Raises:
            ShapeMismatch: the payload has too few or too many bytes.
            ProtocolError: row numbers are out of range, or not in ascending order.
        """
        at = 4 * self.dense_size
        dense = _cut(payload, 0, at).view(_FLOAT32)
        found = []
        for table in self.tables:
            count = table.checked_count(_cut(payload, at, 4))
            index = table.checked_numbers(_cut(payload, at + 4, 4 * count))
            at += 4 + 4 * count
            values = _cut(payload, at, 4 * count * table.width).view(_FLOAT32).reshape(count, table.width)
            at += values.nbytes
            found.append(Rows(index, values))
        if at != payload.size:
            raise ShapeMismatch(f"Rows: expected {at} bytes. Received: {payload.size}. The sender has another model.")
        return RowVector(dense, tuple(found))

    def decode_numbers(self, payload: Payload) -> list[npt.NDArray[np.int32]]:
        """Return the row numbers of each table from the bytes of :func:`encode_numbers`, of another process.

        Raises:
            ShapeMismatch: the payload has too few or too many bytes.
            ProtocolError: row numbers are out of range, or not in ascending order.
        """
        at, found = 0, []
        for table in self.tables:
            count = table.checked_count(_cut(payload, at, 4))
            found.append(table.checked_numbers(_cut(payload, at + 4, 4 * count)))
            at += 4 + 4 * count
        if at != payload.size:
            raise ShapeMismatch(f"Rows: expected {at} bytes. Received: {payload.size}. The sender has another model.")
        return found


def encode_numbers(numbers: Sequence[npt.NDArray[np.int32]]) -> Payload:
    """Encode row numbers of each table, ascending, as little-endian int32: how many there are, and the numbers."""
    parts = [part for index in numbers for part in (np.array([index.size], _INT32), np.asarray(index, _INT32))]
    return np.concatenate(parts).view(np.uint8) if parts else np.zeros(0, np.uint8)


def _added(values: Vector, starts: npt.NDArray[np.intp]) -> Vector:
    """Sum runs of rows, most of them short, with the result of ``np.add.reduceat`` but ten times as fast."""
    counts = np.diff(starts, append=len(values))
    added = values[starts]
    for run in np.flatnonzero(counts > LONG_RUN):
        added[run] = values[starts[run] : starts[run] + counts[run]].sum(axis=0)
    for place in range(1, LONG_RUN):
        runs = np.flatnonzero((counts > place) & (counts <= LONG_RUN))
        if not runs.size:
            break
        added[runs] += values[starts[runs] + place]
    return added


def _cut(payload: Payload, start: int, size: int) -> Payload:
    if payload.size < start + size:
        raise ShapeMismatch(f"Rows: expected at least {start + size} bytes. Received: {payload.size}.")
    return payload[start : start + size]
