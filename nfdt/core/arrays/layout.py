"""Layout of named arrays in a flat float32 vector, and its division into runs for shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ShapeMismatch, UsageError

Array = npt.NDArray[Any]

MAX_VARIABLES = 100_000
MAX_RANK = 16
CUT_TOLERANCE = 0.02  # of a shard's share
BLOCK_ROWS = 16  # rows of a kernel, as the matrix (inputs, units), that update rules process together
MAX_SURPLUS = 4096  # elements; a smaller surplus is not worth cutting variables
RowSelection = slice | npt.NDArray[np.int64]


@dataclass(frozen=True)
class VariableSlot:
    """One variable's place: name, shape, and start in the flat vector (in elements)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """End of the variable in the flat vector, exclusive."""
        return self.start + self.size


@dataclass(frozen=True)
class Piece:
    """A variable, or the part of one that lies in a run.

    Attributes:
        variable: Index of the variable among all variables.
        slot: Slot of the whole variable.
        start: Start of the part in the variable, in elements.
        stop: End of the part in the variable, exclusive.
    """

    variable: int
    slot: VariableSlot
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether the piece is the whole variable."""
        return self.stop - self.start == self.slot.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the variable; for a part, that of its rows, or of its elements where a row is cut."""
        if self.whole:
            return self.slot.shape
        row = math.prod(self.slot.shape[1:])
        if self.start % row or self.stop % row:
            return (self.stop - self.start,)
        return ((self.stop - self.start) // row, *self.slot.shape[1:])


@dataclass(frozen=True)
class Run:
    """A contiguous part of a flat vector: from ``start`` to ``stop``, in elements, and the pieces in it."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Run:
        """Return the run of contiguous pieces."""
        if not pieces:
            return cls(0, 0, ())
        first, last = pieces[0], pieces[-1]
        return cls(first.slot.start + first.start, last.slot.start + last.stop, tuple(pieces))

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def elements(self) -> slice:
        """Position of the run in the flat vector."""
        return slice(self.start, self.stop)

    @property
    def layout(self) -> ParameterLayout:
        """Layout of the pieces, from 0."""
        return ParameterLayout.of([(piece.slot.name, piece.shape) for piece in self.pieces])


@dataclass(frozen=True)
class ParameterLayout:
    """Trainable variables in model order <-> one flat float32 vector of ``size`` elements.

    Attributes:
        slots: Slots of the variables.
        divisible: Whether variables may be cut, because all operations on the vector are elementwise.
    """

    slots: tuple[VariableSlot, ...]
    divisible: bool = False

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]] | Sequence[tuple[str, Sequence[int]]]) -> ParameterLayout:
        """Return the layout of the given (name, shape) pairs in order.

        Raises:
            UsageError: more than ``MAX_VARIABLES`` variables, a rank above ``MAX_RANK`` or a negative dimension.
        """
        pairs = list(shapes.items() if isinstance(shapes, Mapping) else shapes)
        if len(pairs) > MAX_VARIABLES:
            raise UsageError(f"A model may have {MAX_VARIABLES} trainable variables. Received: {len(pairs)}.")
        slots = []
        start = 0
        for name, shape in pairs:
            if len(shape) > MAX_RANK or any(int(n) < 0 for n in shape):
                raise UsageError(
                    f"Variable {name!r}: expected at most {MAX_RANK} dimensions, none negative. Received: {shape}."
                )
            slot = VariableSlot(name, tuple(int(n) for n in shape), start)
            slots.append(slot)
            start = slot.stop
        return cls(tuple(slots))

    @property
    def size(self) -> int:
        """Number of elements of the flat vector."""
        return self.slots[-1].stop if self.slots else 0

    def flatten(self, arrays: Sequence[Array]) -> npt.NDArray[np.float32]:
        """Copy the variables (in order) into a new flat vector, shape ``(size,)``, float32."""
        if len(arrays) != len(self.slots):
            raise ShapeMismatch(f"Expected {len(self.slots)} arrays. Received: {len(arrays)}.")
        flat = np.empty(self.size, np.float32)
        for slot, array in zip(self.slots, arrays, strict=True):
            if tuple(array.shape) != slot.shape:
                raise ShapeMismatch(
                    f"Variable {slot.name!r}: expected shape {slot.shape}. Received: {tuple(array.shape)}."
                )
            flat[slot.start : slot.stop] = np.asarray(array, np.float32).reshape(-1)
        return flat

    def unflatten(self, flat: Array) -> list[Array]:
        """Return views of ``flat`` in the variables' shapes, in order."""
        if flat.shape != (self.size,):
            raise ShapeMismatch(f"Expected a vector of {self.size} elements. Received: shape {flat.shape}.")
        return [flat[s.start : s.stop].reshape(s.shape) for s in self.slots]

    def without(self, variables: Sequence[int]) -> ParameterLayout:
        """Return the layout of the other variables, from 0."""
        return ParameterLayout.of([(s.name, s.shape) for i, s in enumerate(self.slots) if i not in variables])

    def cut(self, shards: int) -> list[Run]:
        """Cut the flat vector into at most ``shards`` runs of about equal size, in order.

        Runs end where variables end, unless a run then exceeds its share by more than twice ``CUT_TOLERANCE`` of it and
        by more than ``MAX_SURPLUS`` elements. In that case variables are cut as well, if the layout is ``divisible``:
        between two blocks of rows, or two rows, where that is near enough.

        Returns:
            Runs, each with at least one variable. Fewer than ``shards`` when there are fewer variables and none is cut.
        """
        if shards < 1:
            raise UsageError(f"shards: expected at least 1. Received: {shards}.")
        runs = self._whole_runs(min(shards, len(self.slots)) or 1)
        share = self.size / shards
        surplus = max(run.size for run in runs) - share
        if self.divisible and surplus > max(2 * CUT_TOLERANCE * share, MAX_SURPLUS):
            borders = [self._border_near(share * i, CUT_TOLERANCE * share) for i in range(1, shards)]
            return [self._run(*ends) for ends in itertools.pairwise([0, *borders, self.size])]
        return runs

    def _whole_runs(self, count: int) -> list[Run]:
        borders = [0]
        for shard in range(1, count):
            target = self.size * shard / count
            candidates = range(borders[-1] + 1, len(self.slots) - (count - shard) + 1)
            borders.append(min(candidates, key=lambda i: abs(self.slots[i].start - target)))
        ends = itertools.pairwise([*borders, len(self.slots)])
        return [Run.of([Piece(i, s, 0, s.size) for i, s in enumerate(self.slots)][a:b]) for a, b in ends]

    def _border_near(self, target: float, tolerance: float) -> int:
        """Return where to cut: between two variables, else two blocks of rows of one, else two rows, else in a row."""
        between = min((slot.start for slot in self.slots), key=lambda start: abs(start - target))
        slot = next(slot for slot in self.slots if slot.start <= target < slot.stop)
        row, block = math.prod(slot.shape[1:]), BLOCK_ROWS * math.prod(slot.shape[-1:])
        steps = (math.lcm(row, block) if len(slot.shape) > 1 else BLOCK_ROWS, row)
        inside = [slot.start + step * round((target - slot.start) / step) for step in steps]
        near = [border for border in (between, *inside) if abs(border - target) <= tolerance]
        return near[0] if near else round(target)

    def _run(self, start: int, stop: int) -> Run:
        """Return the run of these elements; an empty variable belongs to the run of its start, or to the last one."""
        pieces = []
        for index, slot in enumerate(self.slots):
            begin, end = max(slot.start, start), min(slot.stop, stop)
            if begin < end or (not slot.size and (start <= slot.start < stop or slot.start == stop == self.size)):
                pieces.append(Piece(index, slot, begin - slot.start, end - slot.start))
        return Run.of(pieces)

    def to_json(self) -> list[list[Any]]:
        """Return ``[[name, [dim, ...]], ...]``."""
        return [[s.name, list(s.shape)] for s in self.slots]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Any]]) -> ParameterLayout:
        """Inverse of :meth:`to_json`; checks limits."""
        return cls.of([(str(name), shape) for name, shape in value])
