"""Rows of tables that follow from a seed, by blocks: whichever process makes a row, it has the same values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ProtocolError

Vector = npt.NDArray[np.float32]
Distribution = Literal["uniform", "normal", "truncated_normal"]

BLOCK_ROWS = 128
"""Rows of a block, which is made as a whole."""

_TRUNCATED_AT = 2.0  # standard deviations, as in Keras


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of consecutive rows of a table; they begin where those of the whole table begin.

    Attributes:
        first: Number of the first row in the whole table.
        size: Number of rows.
    """

    first: int
    size: int

    @property
    def count(self) -> int:
        """Number of blocks, of which the first and the last one may be parts."""
        return -(-(self.first % BLOCK_ROWS + self.size) // BLOCK_ROWS)

    def number(self, block: int) -> int:
        """Return the number of a block in the whole table."""
        return self.first // BLOCK_ROWS + block

    def rows(self, block: int, stop: int | None = None) -> slice:
        """Return the rows of a block, or of the blocks from it on up to ``stop``, exclusive."""
        begin, end = (BLOCK_ROWS * at - self.first % BLOCK_ROWS for at in (block, block + 1 if stop is None else stop))
        return slice(max(0, begin), min(self.size, end))

    def of(self, index: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
        """Return the blocks of some rows, ascending, without repetition."""
        return np.unique((index + self.first % BLOCK_ROWS) // BLOCK_ROWS)


@dataclass(frozen=True)
class SeededRows:
    """Rows of a table, drawn independently.

    Attributes:
        distribution: Distribution of the elements; ``truncated_normal`` has nothing beyond two standard deviations.
        shift: Least value of ``uniform``; mean of the others.
        scale: Greatest value of ``uniform`` less the least one; standard deviation of the others. 0: all are ``shift``.
        seed: Seed; with the number of a block it determines the rows of the block.
    """

    distribution: Distribution
    shift: float
    scale: float
    seed: int

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> SeededRows:
        """Inverse of :meth:`to_json`.

        Raises:
            ProtocolError: the entry is no description of rows.
        """
        try:
            numbers = float(entry["shift"]), float(entry["scale"]), int(entry["seed"])
            if entry["distribution"] not in get_args(Distribution):
                raise ValueError(entry["distribution"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"Rows by a seed: expected a distribution, shift, scale and seed. {error!r}") from None
        return cls(entry["distribution"], *numbers)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes by name."""
        return asdict(self)

    def block(self, number: int, width: int) -> Vector:
        """Return the rows of a block, shape ``(BLOCK_ROWS, width)``, float32."""
        if not self.scale:
            return np.full((BLOCK_ROWS, width), self.shift, np.float32)
        random = np.random.Generator(np.random.Philox(key=np.array([self.seed % 2**64, number], np.uint64)))
        drawn: Vector
        if self.distribution == "uniform":
            drawn = random.random((BLOCK_ROWS, width), np.float32)
        else:
            drawn = random.standard_normal((BLOCK_ROWS, width), np.float32)
            while self.distribution == "truncated_normal" and (beyond := np.abs(drawn) > _TRUNCATED_AT).any():
                drawn[beyond] = random.standard_normal(int(beyond.sum()), np.float32)
        drawn *= np.float32(self.scale)
        drawn += np.float32(self.shift)
        return drawn

    def fill(self, rows: Vector, first: int = 0) -> None:
        """Write the rows of the table from number ``first`` on into ``rows``, shape ``(k, width)``, float32."""
        blocks = RowBlocks(first, len(rows))
        for number in range(blocks.count):
            part, whole = blocks.rows(number), blocks.number(number)
            begin = first + part.start - whole * BLOCK_ROWS
            rows[part] = self.block(whole, rows.shape[1])[begin : begin + part.stop - part.start]
