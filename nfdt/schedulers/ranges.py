"""Consecutive numbers that are not handed out yet, in a pool or in shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import accumulate

from nfdt.schedulers.proportions import largest_remainder


class Ranges:
    """Numbers to be handed out in order: one pool for all, until it is divided into a contiguous share per worker.

    A share whose worker is gone falls into the pool, from which all take once its own share is empty; so does a
    worker that came too late for a share.
    """

    def __init__(self, numbers: range) -> None:
        self._pool = deque([numbers] if numbers else [])
        self._shares: dict[str, range] = {}

    def __len__(self) -> int:
        """Numbers not handed out."""
        return sum(map(len, self._pool)) + sum(map(len, self._shares.values()))

    def divide(self, weights: Mapping[str, float]) -> None:
        """Share out the front of the pool, in proportion to the weights, each share within one of its exact size."""
        if not self._pool or not weights:
            return
        numbers = self._pool.popleft()
        ends = list(accumulate(largest_remainder(len(numbers), list(weights.values()))))
        for worker, start, stop in zip(weights, [0, *ends], ends, strict=False):
            self._shares[worker] = numbers[start:stop]

    def take(self, worker: str, limit: int) -> range:
        """Up to ``limit`` consecutive numbers of this worker's share, else of the pool; empty when there are none."""
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
        """The worker's share falls into the pool."""
        share = self._shares.pop(worker, range(0))
        if share:
            self._pool.append(share)

    def drop(self) -> None:
        """Forget everything."""
        self._pool.clear()
        self._shares.clear()

    def has(self, worker: str) -> bool:
        """Whether :meth:`take` would give the worker something."""
        return bool(self._pool or self._shares.get(worker))
