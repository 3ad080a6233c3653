"""Blocks of elements that share their factors in a rule: parts of variables, rows of a table, or single elements.

A kernel, its last axis kept, is a matrix ``(inputs, units)``. A block of it is ``BLOCK_ROWS`` rows of one column, or
the remaining rows at its end: some of the weights that lead into one unit. A vector is a matrix of one column. A
block never spans two variables. Blocks begin at every ``BLOCK_ROWS``-th row of a variable, so that shards which are
cut there have the same blocks as a single shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from nfdt.core.arrays.layout import BLOCK_ROWS
from nfdt.update_rules.base import Array, ArrayOps


class Blocks(Protocol):
    """Sums over blocks, and factors for them."""

    def sums(self, ops: ArrayOps, vector: Array) -> Array:
        """Return the sum of each block's elements, shape ``(blocks,)``."""

    def scaled(self, ops: ArrayOps, vector: Array, factors: Array) -> Array:
        """Return the vector, each element times its block's factor; ``factors`` has shape ``(blocks,)``."""


class Elements:
    """Blocks of one element each."""

    def sums(self, ops: ArrayOps, vector: Array) -> Array:
        """Return the vector itself."""
        return vector

    def scaled(self, ops: ArrayOps, vector: Array, factors: Array) -> Array:
        """Return the product."""
        return vector * factors


class TableRows:
    """Blocks of one row of a table, or of its present rows; vectors have shape ``(rows, width)``."""

    def sums(self, ops: ArrayOps, vector: Array) -> Array:
        """Return one sum for each row."""
        return ops.sum(vector, -1)

    def scaled(self, ops: ArrayOps, vector: Array, factors: Array) -> Array:
        """Return the rows times their factors."""
        return vector * factors[:, None]


@dataclass(frozen=True)
class _Part:
    """Consecutive blocks: ``(blocks, rows, columns)``, from element ``start`` and block ``first``."""

    start: int
    first: int
    shape: tuple[int, int, int]

    @property
    def elements(self) -> slice:
        return slice(self.start, self.start + math.prod(self.shape))

    @property
    def sums(self) -> slice:
        return slice(self.first, self.first + self.shape[0] * self.shape[2])


class KernelBlocks:
    """The blocks of consecutive variables in a flat vector.

    Args:
        shapes: Shapes of the variables, or of their present parts, in order.
        tables: For each variable, whether its rows are the blocks, as in an embedding.
    """

    def __init__(self, shapes: Iterable[tuple[int, ...]], tables: Iterable[bool]) -> None:
        self._parts: list[_Part] = []
        start = first = 0
        for shape, table in zip(shapes, tables, strict=True):
            for part_shape in _part_shapes(shape, table):
                part = _Part(start, first, part_shape)
                self._parts.append(part)
                start, first = part.elements.stop, part.sums.stop

    @property
    def parts(self) -> list[tuple[int, int, int, int, int]]:
        """Parts of the vector: first element, first block, and the shape ``(blocks, rows, columns)``, each consecutive.

        A block of a part is a column of ``rows`` elements.
        """
        return [(part.start, part.first, *part.shape) for part in self._parts]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self._parts[-1].sums.stop if self._parts else 0

    def sums(self, ops: ArrayOps, vector: Array) -> Array:
        """Return the sum of each block, part by part."""
        found = [ops.sum(ops.reshape(vector[part.elements], part.shape), 1) for part in self._parts]
        return ops.concatenate([ops.reshape(sums, (-1,)) for sums in found]) if found else vector

    def scaled(self, ops: ArrayOps, vector: Array, factors: Array) -> Array:
        """Return the product, part by part."""
        found = []
        for part in self._parts:
            blocks, _, columns = part.shape
            own = ops.reshape(factors[part.sums], (blocks, 1, columns))
            found.append(ops.reshape(ops.reshape(vector[part.elements], part.shape) * own, (-1,)))
        return ops.concatenate(found) if found else vector


def _part_shapes(shape: tuple[int, ...], table: bool) -> list[tuple[int, int, int]]:
    """Return full blocks, and the rest at the end; none for a variable without elements."""
    size = math.prod(shape)
    columns = shape[-1] if len(shape) > 1 else 1
    if not size:
        return []
    rows = size // columns
    if table:
        return [(rows, columns, 1)]
    found = [(rows // BLOCK_ROWS, BLOCK_ROWS, columns), (1, rows % BLOCK_ROWS, columns)]
    return [part for part in found if part[0] and part[1]]
