"""State of an engine at one moment, read piece by piece while updates go on: nothing is copied as a whole.

An update that comes to a stripe, or to a block of rows, which may still be read copies that first. Between epochs
nothing is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import ArrayEntry, Pieces
from nfdt.core.arrays.seeded_rows import BLOCK_ROWS, RowBlocks
from nfdt.core.errors import ProtocolError
from nfdt.core.sharding.records import RecordTree, to_arrays, to_tree

Vectors = Mapping[str, Array]

PIECE_BYTES = 2**20


@dataclass(frozen=True)
class HeldState:
    """State of a shard at one moment.

    Attributes:
        weights: The weights, a vector or :class:`~nfdt.core.arrays.safetensors_io.Pieces` of one.
        optimizer: The shard's part of the optimizer's variables, by index, each as an array or its pieces.
        records: All other state; see :mod:`nfdt.core.sharding.records`. Its leaves may be pieces.
        release: To be called once the state has been read: it keeps memory of updates since.
    """

    weights: Any
    optimizer: Mapping[int, Any]
    records: RecordTree = field(default_factory=dict)
    release: Callable[[], None] = lambda: None

    def copied(self) -> HeldState:
        """Return a copy of the whole state, and release this one."""
        try:
            optimizer = {index: whole(array) for index, array in self.optimizer.items()}
            records = {name: whole(array) for name, array in to_arrays(self.records).items()}
            return HeldState(whole(self.weights), optimizer, to_tree(records))
        finally:
            self.release()


class StateHolder:
    """What has a state that can be held, and so be copied as well."""

    def hold(self, *, weights_only: bool = False) -> HeldState:
        """Return the present state."""
        raise NotImplementedError

    def read(self) -> tuple[Array, dict[int, Array]]:
        """Return copies of the weights and of the shard's part of the optimizer's variables, by index."""
        copy = self.hold().copied()
        return copy.weights, dict(copy.optimizer)


class KeptWeights:
    """Weights of a shard at one moment, for workers that evaluate them while others train. Thread-safe.

    Args:
        holder: The shard's store.
    """

    def __init__(self, holder: StateHolder) -> None:
        self._holder, self._lock = holder, threading.Lock()
        self._held: HeldState | None = None  # until the first reader
        self._weights: Array | None = None

    def keep(self, kept: bool) -> None:
        """Keep the present weights in place of those kept before; False: keep none."""
        held = self._holder.hold(weights_only=True) if kept else None
        with self._lock:
            before, self._held, self._weights = self._held, held, None
        if before is not None:
            before.release()

    def read(self) -> Array:
        """Return the kept weights, which nobody changes.

        Raises:
            ProtocolError: none are kept.
        """
        with self._lock:
            if self._held is not None:
                self._weights, self._held = self._held.copied().weights, None
            if self._weights is None:
                raise ProtocolError("Pull: expected weights that are kept from an epoch's end. Received: none.")
            return self._weights


def whole(array: Any) -> Array:
    """Return a copy of an array, or of one in pieces."""
    return array.joined() if isinstance(array, Pieces) else np.array(array)


class HeldRows:
    """Arrays with one row for each row of a table, at one moment.

    An update copies the blocks of rows that it changes first. It and each read hold the lock of the table.

    Args:
        arrays: The arrays by name; updates change them in place.
        blocks: Blocks of rows.
        lock: Lock of the table.
        complete: Completes a copy of the rows of an array from some row on, by rows that are not made yet.
    """

    def __init__(
        self,
        arrays: Vectors,
        blocks: RowBlocks,
        lock: threading.Lock,
        complete: Callable[[str, Array, int], None],
    ) -> None:
        self._arrays, self._blocks, self._lock, self._complete = arrays, blocks, lock, complete
        self._kept: dict[int, Vectors] = {}

    def keep(self, blocks: Iterable[int]) -> None:
        """Copy blocks, which are about to be updated, unless it has been done since that moment; under the lock."""
        for block in blocks:
            if block not in self._kept:
                rows = self._blocks.rows(block)
                self._kept[block] = {name: array[rows].copy() for name, array in self._arrays.items()}

    def pieces(self, name: str) -> Pieces:
        """Return an array, copied piece by piece as it is read."""
        array = self._arrays[name]
        return Pieces(ArrayEntry(array.dtype, array.shape), self._read(name))

    def _read(self, name: str) -> Iterator[Array]:
        array = self._arrays[name]
        step = max(1, PIECE_BYTES // max(1, BLOCK_ROWS * array.strides[0]))
        for first in range(0, self._blocks.count, step):
            stop = min(first + step, self._blocks.count)
            rows = self._blocks.rows(first, stop)
            with self._lock:
                piece = array[rows].copy()
                self._complete(name, piece, rows.start)
                for block in self._kept.keys() & range(first, stop):
                    kept = self._blocks.rows(block)
                    piece[kept.start - rows.start : kept.stop - rows.start] = self._kept[block][name]
            yield piece


class HeldVectors:
    """Vectors of one size at one moment. Thread-safe.

    Args:
        vectors: The vectors by name; updates change them in place.
        stripes: Ends of the stripes in which updates proceed, ascending; the last one is the size of the vectors.
    """

    def __init__(self, vectors: Vectors, stripes: Sequence[int]) -> None:
        self._vectors, self._ends = dict(vectors), stripes
        self._starts = [0, *stripes[:-1]]
        self._kept: dict[int, Vectors] = {}
        self._lock = threading.Lock()

    def keep(self, stripe: int) -> None:
        """Copy a stripe, which is about to be updated for the first time since that moment."""
        with self._lock:
            if stripe not in self._kept:
                begin, end = self._starts[stripe], self._ends[stripe]
                self._kept[stripe] = {name: vector[begin:end].copy() for name, vector in self._vectors.items()}

    def read(self, names: Sequence[str], begin: int, end: int) -> Iterator[Vectors]:
        """Yield copies of the elements from ``begin`` to ``end`` of these vectors, stripe by stripe."""
        first = int(np.searchsorted(self._ends, begin, "right"))
        for stripe in range(first, len(self._ends)):
            start, low, high = self._starts[stripe], max(begin, self._starts[stripe]), min(end, self._ends[stripe])
            if low >= high:
                return
            with self._lock:
                held = self._kept.get(stripe)
                offset = start if held is not None else 0
                source = held if held is not None else self._vectors
                piece = {name: source[name][low - offset : high - offset].copy() for name in names}
            yield piece
