"""Set of task numbers, as ranges: numbers are given consecutively, so there are few."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class TaskNumbers:
    """Set of numbers, kept as sorted and disjoint ranges; ranges that touch are merged.

    Args:
        ranges: (begin, end) of each range, sorted and disjoint.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = [(int(begin), int(end)) for begin, end in ranges]
        self._begins = [begin for begin, _ in pairs]
        self._ends = [end for _, end in pairs]

    def __contains__(self, number: object) -> bool:
        assert isinstance(number, int)
        at = bisect_right(self._begins, number)
        return at > 0 and number < self._ends[at - 1]

    def add(self, number: int) -> None:
        """Add a number; does nothing if the set has it."""
        if number in self:
            return
        at = bisect_right(self._begins, number)
        follows = at > 0 and self._ends[at - 1] == number
        precedes = at < len(self._begins) and self._begins[at] == number + 1
        if follows and precedes:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif follows:
            self._ends[at - 1] = number + 1
        elif precedes:
            self._begins[at] = number
        else:
            self._begins.insert(at, number)
            self._ends.insert(at, number + 1)

    def to_array(self) -> npt.NDArray[np.int64]:
        """Return the ranges, shape ``(ranges, 2)``."""
        return np.array([self._begins, self._ends], np.int64).T
