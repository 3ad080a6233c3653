"""Durations of a worker's tasks and pushes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nfdt.core.work import instructions as ins


class TaskTimes:
    """Times of a worker's tasks, lease after lease; a task may be reported with a later lease than its own.

    Args:
        clock: Function that returns the worker's time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tasks: dict[int, tuple[float, float]] = {}
        self._pushes: dict[int, float] = {}
        self.begin(0.0)

    def begin(self, compute_s: float) -> None:
        """Begin a lease; ``compute_s`` is the total of computation seconds so far."""
        self._began = self._at = self._clock()
        self._computed_s = compute_s
        self._done = 0

    def spent(self, task: int, compute_s: float) -> None:
        """Charge the time since the last call to this task; ``compute_s`` is the current total."""
        now, (computed, rest) = self._clock(), self._tasks.get(task, (0.0, 0.0))
        more = compute_s - self._computed_s
        self._tasks[task] = (computed + more, rest + max(0.0, now - self._at - more))
        self._at, self._computed_s = now, compute_s
        self._done += 1

    def pushed(self, task: int, seconds: float) -> None:
        """Record the time from the push of this task to the arrival of its reply."""
        self._pushes[task] = seconds

    def over(self, budget_s: float) -> bool:
        """Whether a task of the lease is finished and the budget is spent; 0 is no limit."""
        return bool(budget_s and self._done) and self._clock() - self._began >= budget_s

    def taken(self, tasks: Iterable[int]) -> dict[int, ins.TaskTime]:
        """Return the times of these tasks, where there are any, and forget them."""
        times = {task: ins.TaskTime(*self._tasks.pop(task, (0.0, 0.0)), self._pushes.pop(task, 0.0)) for task in tasks}
        return {task: time for task, time in times.items() if time.compute_s + time.exchange_s > 0}
