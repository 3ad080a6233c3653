"""Numbers that are still available, in a pool or in shares, and sets of rows."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate

from nfdt.schedulers.proportions import largest_remainder

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


class Ranges:
    """Available numbers in order: one pool for all workers, until it is divided into a contiguous share per worker.

    The share of a lost worker returns to the pool. A worker takes from the pool once its own share is empty, or if it
    joined too late for a share.

    Args:
        numbers: Ranges of numbers, disjoint and in order.
    """

    def __init__(self, *numbers: range) -> None:
        self._pool = deque(filter(None, numbers))
        self._shares: dict[str, range] = {}

    def __len__(self) -> int:
        """Return the count of available numbers."""
        return sum(map(len, self._pool)) + sum(map(len, self._shares.values()))

    def divide(self, weights: Mapping[str, float]) -> None:
        """Divide the front of the pool in proportion to the weights, each share within one of its exact size."""
        if not self._pool or not weights:
            return
        numbers = self._pool.popleft()
        ends = list(accumulate(largest_remainder(len(numbers), list(weights.values()))))
        for worker, start, stop in zip(weights, [0, *ends], ends, strict=False):
            self._shares[worker] = numbers[start:stop]

    def take(self, worker: str, limit: int) -> range:
        """Take up to ``limit`` consecutive numbers of the worker's share, else of the pool; empty if there are none."""
        own = self._shares.get(worker, range(0))
        if own:
            self._shares[worker] = own[limit:]
            return own[:limit]
        if not self._pool:
            return range(0)
        head = self._pool.popleft()
        if head[limit:]:
            self._pool.appendleft(head[limit:])
        return head[:limit]

    def release(self, worker: str) -> None:
        """Return the worker's share to the pool."""
        share = self._shares.pop(worker, range(0))
        if share:
            self._pool.append(share)

    def drop(self) -> None:
        """Discard all numbers."""
        self._pool.clear()
        self._shares.clear()

    def has(self, worker: str) -> bool:
        """Whether :meth:`take` would return numbers for the worker."""
        return bool(self._pool or self._shares.get(worker))
