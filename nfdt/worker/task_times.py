"""Where a worker's time went: what each task took of the wall clock, and how much of that was computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol


class Timed(Protocol):
    """A finished task that its times are written into."""

    task: int
    compute_s: float
    exchange_s: float


class LeaseTimes:
    """Times of a worker's tasks, lease after lease; a task may be reported with a later lease than its own.

    Args:
        clock: Seconds that pass for the worker.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tasks: dict[int, tuple[float, float]] = {}
        self.begin(0.0)

    def begin(self, compute_s: float) -> None:
        """A lease begins now; the worker has computed ``compute_s`` seconds in all so far."""
        self._began = self._at = self._clock()
        self._computed_s = compute_s
        self._done = 0

    def spent(self, task: int, compute_s: float) -> None:
        """What has passed since the last call was this task's; ``compute_s`` is the total by now."""
        now, (computed, rest) = self._clock(), self._tasks.get(task, (0.0, 0.0))
        more = compute_s - self._computed_s
        self._tasks[task] = (computed + more, rest + max(0.0, now - self._at - more))
        self._at, self._computed_s = now, compute_s
        self._done += 1

    def over(self, budget_s: float) -> bool:
        """Whether a task of the lease is done and the budget is spent; 0: there is none."""
        return bool(budget_s and self._done) and self._clock() - self._began >= budget_s

    def fill(self, finished: Iterable[Timed]) -> None:
        """Write each task's times into its report, and forget them."""
        for done in finished:
            done.compute_s, done.exchange_s = self._tasks.pop(done.task, (0.0, 0.0))
