"""Rows of the members of a group: few different numbers, as JAX compiles a step for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise


def row_unit(largest: int, *others: int, parts: int = 16) -> int:
    """Return the greatest common divisor of these numbers of rows that is at most a part of the largest one.

    >>> row_unit(128), row_unit(100), row_unit(128, 300), row_unit(13)
    (8, 5, 4, 1)
    """
    common = math.gcd(largest, *others)
    return next(unit for unit in range(max(1, largest // parts), 0, -1) if common % unit == 0)


def member_rows(start: int, stop: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return the part ``[start, stop)`` of a batch of each member, in proportion to ``shares``.

    With a batch of ``sum(shares)`` rows every member gets exactly its share. The parts of a shorter one, but for the
    last, are multiples of a common divisor of the shares, of at most a quarter of the largest one.

    Args:
        start: First row of the batch.
        stop: The row behind its last one.
        shares: Rows of each member in a full batch, at least 1.
    """
    rows, whole, unit = stop - start, sum(shares), row_unit(max(shares), *shares, parts=4)
    cuts = [start + unit * (rows * before // (whole * unit)) for before in accumulate(shares, initial=0)]
    return list(pairwise([*cuts[:-1], stop]))
