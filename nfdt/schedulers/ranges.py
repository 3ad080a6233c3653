"""Consecutive numbers that are still available, in a pool or in shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import accumulate

from nfdt.schedulers.proportions import largest_remainder


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
