"""The consistency policies: without a bound, in rounds, averaged on arrival, and with bounded staleness."""

from __future__ import annotations

import math
from collections import Counter, deque

from nfdt.consistency.base import ConsistencyPolicy
from nfdt.core.specs.presets import CONSISTENCY_FACTS


class Free(ConsistencyPolicy):
    """Policy of asynchronous training (ASP): no worker waits for another."""

    name = "free"
    facts = CONSISTENCY_FACTS[name]


class Rounds(Free):
    """Free policy with leases of the steps between two reports: a group's push, or a commit of elastic ranks."""

    def __init__(self, steps: int) -> None:
        self.lease_limit: int | None = steps


class Barrier(ConsistencyPolicy):
    """Policy of rounds of M local batches; the next round is leased when all batches of the last are finished.

    The lease book enforces the order of rounds, because only it has the parts of a round. Therefore this policy
    blocks no worker.

    Args:
        parts: M if one worker computes whole rounds, which are then leased at once; None: one part per worker.
    """

    name = "bsp"
    facts = CONSISTENCY_FACTS[name]

    def __init__(self, parts: int | None = None) -> None:
        self._parts = parts
        self.lease_limit: int | None = parts or 1

    def round_parts(self, workers: int) -> int:
        """Return one part per worker, or the fixed number."""
        return self._parts or max(1, workers)


class Softsync(ConsistencyPolicy):
    """Policy under which no worker waits; gradients are averaged on arrival.

    References:
        Zhang et al., IJCAI 2016, "Staleness-aware Async-SGD": mean staleness about n.
    """

    name = "softsync"
    facts = CONSISTENCY_FACTS[name]
    lease_limit: int | None = 1

    def __init__(self, n: int) -> None:
        self.n = n

    def merge_count(self, workers: int) -> int:
        """Return ``floor(workers / n)``, at least 1."""
        return max(1, workers // self.n)


class BoundedStaleness(ConsistencyPolicy):
    """Policy under which a worker may start while it is at most ``bound`` steps ahead of the slowest active one.

    The lead counts the steps that it has finished and those that it overlaps, minus the steps that the slowest has
    finished. Step c, counted from 0, is computed on weights that hold the steps 0 to c - bound - 1 of every active
    worker: a worker pulls if the reply to its last push may be older than that.

    A worker that joins starts with the step count of the slowest active one: its missing past must neither block the
    others nor itself. A worker that returns after it was idle continues with its own step count, or with that of the
    slowest if that is greater. When no worker is active, or the weights have gone back, all counts restart at 0.

    References:
        Ho et al., NIPS 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server".
    """

    name = "ssp"
    facts = CONSISTENCY_FACTS[name]
    lease_limit: int | None = 1

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._steps: dict[str, int] = {}
        self._idle: set[str] = set()
        self._levels: Counter[int] = Counter()  # number of active workers by steps; there are few levels
        self._seen: dict[str, deque[float]] = {}  # steps of all others guaranteed in the replies to a worker's steps

    def joined(self, worker: str) -> None:
        """Add a worker with the step count of the slowest active worker."""
        self.left(worker)
        self._enter(worker, min(self._levels, default=0))

    def left(self, worker: str) -> None:
        """Remove a worker."""
        self.idle(worker)
        self._steps.pop(worker, None)
        self._idle.discard(worker)

    def started(self, worker: str, tasks: int = 1) -> None:
        """Record that the worker is active (again)."""
        if worker not in self._steps:
            self.joined(worker)
        elif worker in self._idle:
            self._enter(worker, self._level_of(worker))
        own = self._steps[worker]
        others = (level for level, count in self._levels.items() if count > (level == own))
        self._seen.setdefault(worker, deque(maxlen=self.bound + 1)).append(min(others, default=math.inf))

    def finished(self, worker: str, tasks: int = 1) -> None:
        """Add ``tasks`` to the worker's steps."""
        if worker not in self._steps:
            return
        if worker not in self._idle:
            self._count(self._steps[worker], -1)
            self._count(self._steps[worker] + tasks, 1)
        self._steps[worker] += tasks

    def idle(self, worker: str) -> None:
        """Mark the worker as idle: it blocks no other until it starts again."""
        if worker not in self._steps or worker in self._idle:
            return
        self._idle.add(worker)
        self._count(self._steps[worker], -1)
        if not self._levels:
            self._steps = dict.fromkeys(self._steps, 0)

    def rewound(self) -> None:
        """Restart all counts: each worker pulls the weights for its next step."""
        self._steps = dict.fromkeys(self._steps, 0)
        self._levels = Counter({0: active} if (active := len(self._steps) - len(self._idle)) else {})
        self._seen.clear()

    def may_start(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the worker is at most ``bound`` steps ahead of the slowest active one."""
        if worker not in self._steps or not self._levels:
            return True
        return self._level_of(worker) + in_flight - min(self._levels) <= self.bound

    def waiting_for(self, worker: str, in_flight: int = 0) -> tuple[str, ...]:
        """Return the active workers that are more than ``bound`` steps behind."""
        if self.may_start(worker, in_flight):
            return ()
        limit = self._level_of(worker) + in_flight - self.bound
        return tuple(sorted(w for w, steps in self._steps.items() if w not in self._idle and steps < limit))

    def must_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the reply to its last push may lack steps of others that the bound guarantees."""
        seen = self._seen.get(worker)
        if worker not in self._steps or not seen or self.bound < in_flight:
            return True
        last = seen[max(0, len(seen) - 1 - in_flight)]  # before the first reply: the pull for its first step
        return last < self._level_of(worker) + in_flight - self.bound

    def will_pull(self, worker: str, in_flight: int = 0) -> bool:
        """Whether the reply to the step just started will lack steps that the bound guarantees the next one."""
        seen = self._seen.get(worker, (math.inf,))
        return seen[-1] < self._steps.get(worker, 0) + in_flight + 1 - self.bound

    def _level_of(self, worker: str) -> int:
        """Return the step count from which the worker's next step is counted."""
        own = self._steps[worker]
        return max(own, min(self._levels, default=own)) if worker in self._idle else own

    def _enter(self, worker: str, steps: int) -> None:
        """Mark the worker as active with ``steps`` steps; its next steps are in no reply yet."""
        self._idle.discard(worker)
        self._steps[worker] = steps
        self._count(steps, 1)
        self._seen.clear()

    def _count(self, level: int, change: int) -> None:
        """Add ``change`` to the number of active workers at a level."""
        self._levels[level] += change
        if not self._levels[level]:
            del self._levels[level]
