"""Rows of the sample orders of passes, as ranges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

RowRange = tuple[int, int, int]
"""(pass, begin, end) of the sample order of a pass."""


class RowSet:
    """Set of rows, as sorted and disjoint ranges; ranges that touch are merged.

    Args:
        ranges: Ranges of the set, in any order; empty ones are ignored.
    """

    def __init__(self, ranges: Iterable[RowRange] = ()) -> None:
        self._ranges: list[RowRange] = []
        for each in ranges:
            self.add(*each)

    @property
    def ranges(self) -> tuple[RowRange, ...]:
        """The ranges, sorted."""
        return tuple(self._ranges)

    def add(self, pass_index: int, begin: int, end: int) -> None:
        """Add the rows ``[begin, end)`` of a pass."""
        if begin >= end:
            return
        first = last = self._first_touching(pass_index, begin)
        while last < len(self._ranges) and self._ranges[last][:2] <= (pass_index, end):
            begin, end = min(begin, self._ranges[last][1]), max(end, self._ranges[last][2])
            last += 1
        self._ranges[first:last] = [(pass_index, begin, end)]

    def missing(self, pass_index: int, rows: range) -> list[range]:
        """Return those of the rows that the set lacks, as sorted ranges."""
        gaps, start = [], rows.start
        for number in range(self._first_touching(pass_index, rows.start), len(self._ranges)):
            found, begin, end = self._ranges[number]
            if (found, begin) >= (pass_index, rows.stop):
                break
            gaps.append(range(start, begin))
            start = end
        gaps.append(range(start, rows.stop))
        return [gap for gap in gaps if gap]

    def _first_touching(self, pass_index: int, row: int) -> int:
        """Return the number of the first range of the pass that ends at ``row`` or after it."""
        first = bisect_left(self._ranges, (pass_index, row, row))
        before = self._ranges[first - 1] if first else None
        return first - (before is not None and before[0] == pass_index and before[2] >= row)
