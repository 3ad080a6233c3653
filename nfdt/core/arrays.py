"""Named arrays laid out one after the other in a flat float32 vector."""

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


@dataclass(frozen=True)
class VariableSlot:
    """One variable's place: name, shape, and where it lies in the flat vector (in elements)."""

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
class ParameterLayout:
    """Trainable variables in model order <-> one flat float32 vector of ``size`` elements."""

    slots: tuple[VariableSlot, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]] | Sequence[tuple[str, Sequence[int]]]) -> ParameterLayout:
        """Lay the given (name, shape) pairs out in order.

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
        """Views of ``flat`` in the variables' shapes, in order."""
        if flat.shape != (self.size,):
            raise ShapeMismatch(f"Expected a vector of {self.size} elements. Received: shape {flat.shape}.")
        return [flat[s.start : s.stop].reshape(s.shape) for s in self.slots]

    def cut(self, shards: int) -> list[slice]:
        """Cut the variables into at most ``shards`` contiguous runs of about equal size.

        Returns:
            Slices over ``self.slots`` (whole variables), none empty, in order. Fewer than
            ``shards`` when there are fewer variables.
        """
        if shards < 1:
            raise UsageError(f"shards: expected at least 1. Received: {shards}.")
        count = min(shards, len(self.slots)) or 1
        borders = [0]
        for shard in range(1, count):
            target = self.size * shard / count
            candidates = range(borders[-1] + 1, len(self.slots) - (count - shard) + 1)
            borders.append(min(candidates, key=lambda i: abs(self.slots[i].start - target)))
        borders.append(len(self.slots))
        return [slice(a, b) for a, b in itertools.pairwise(borders)]

    def select(self, cut: slice) -> ParameterLayout:
        """The layout of a run of variables on its own, starting at 0."""
        return ParameterLayout.of([(s.name, s.shape) for s in self.slots[cut]])

    def bounds(self, cut: slice) -> tuple[int, int]:
        """(start, stop) of a run of variables in the flat vector, in elements."""
        slots = self.slots[cut]
        return (slots[0].start, slots[-1].stop) if slots else (0, 0)

    def to_json(self) -> list[list[Any]]:
        """``[[name, [dim, ...]], ...]``."""
        return [[s.name, list(s.shape)] for s in self.slots]

    @classmethod
    def from_json(cls, value: Sequence[Sequence[Any]]) -> ParameterLayout:
        """Inverse of :meth:`to_json`; checks limits."""
        return cls.of([(str(name), shape) for name, shape in value])
