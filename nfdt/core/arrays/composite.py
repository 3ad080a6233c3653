"""Sparse and ragged arrays: leaves of a batch that consist of several NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ProtocolError


@dataclass(frozen=True, eq=False)
class SparseArray:
    """Array of which only some elements are stored, as in ``tf.SparseTensor``; all others are zero.

    Attributes:
        indices: Positions of the stored elements, shape ``(n, rank)``, int64.
        values: The stored elements, shape ``(n,)``.
        shape: Shape of the whole array.

    Raises:
        ProtocolError: the parts do not fit together.
    """

    indices: Array
    values: Array
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        count = self.values.shape[:1]
        if self.values.ndim != 1 or self.indices.shape != (*count, len(self.shape)) or not self.shape:
            raise ProtocolError(
                f"Sparse array: expected n indices of rank {len(self.shape)} and n values. "
                f"Received shapes: {self.indices.shape} and {self.values.shape}."
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, rows: slice) -> SparseArray:
        """Return consecutive rows."""
        start, stop, _ = rows.indices(self.shape[0])
        kept = (self.indices[:, 0] >= start) & (self.indices[:, 0] < stop)
        indices = self.indices[kept]
        indices[:, 0] -= start
        return SparseArray(indices, self.values[kept], (max(stop - start, 0), *self.shape[1:]))

    def blank(self) -> SparseArray:
        """Return an array of the same shape without stored elements."""
        return SparseArray(self.indices[:0], self.values[:0], self.shape)


@dataclass(frozen=True, eq=False)
class RaggedArray:
    """Array with rows of different lengths, as in ``tf.RaggedTensor``.

    Attributes:
        values: All elements in order, shape ``(n, ...)``.
        splits: For each ragged dimension, the outermost first, where its rows begin, and where the last one ends.

    Raises:
        ProtocolError: the parts do not fit together.
    """

    values: Array
    splits: tuple[Array, ...]

    def __post_init__(self) -> None:
        if not self.splits or not self.values.ndim or any(part.ndim != 1 or not part.size for part in self.splits):
            raise ProtocolError(
                "Ragged array: expected values, and borders of rows as vectors. Received shapes: "
                f"{self.values.shape} and {[part.shape for part in self.splits]}."
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape; None for ragged dimensions."""
        return (len(self.splits[0]) - 1, *(None for _ in self.splits), *self.values.shape[1:])

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.splits) + self.values.ndim

    def __getitem__(self, rows: slice) -> RaggedArray:
        """Return consecutive rows."""
        start, stop, _ = rows.indices(len(self.splits[0]) - 1)
        stop, splits = max(start, stop), []
        for borders in self.splits:
            own = borders[start : stop + 1]  # the next dimension has the rows between the first and the last of these
            splits.append(own - own[0])
            start, stop = int(own[0]), int(own[-1])
        return RaggedArray(self.values[start:stop], tuple(splits))

    def blank(self) -> RaggedArray:
        """Return an array with the same number of rows, all empty."""
        empty = [np.zeros_like(self.splits[0]), *(part[:1] * 0 for part in self.splits[1:])]
        return RaggedArray(self.values[:0], tuple(empty))
