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
        self._pushes: dict[int, tuple[float, float]] = {}  # when a push was sent, and its duration
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

    def sent(self, task: int) -> None:
        """Record that the push of this task is sent."""
        self._pushes[task] = (self._clock(), 0.0)

    def answered(self, task: int) -> float:
        """Record that the reply to the push of this task is taken; return the seconds since, 0 the second time."""
        sent_at, known_s = self._pushes.get(task, (0.0, 1.0))
        if known_s:
            return 0.0
        seconds = self._clock() - sent_at
        self._pushes[task] = (sent_at, seconds)
        return seconds

    def over(self, budget_s: float) -> bool:
        """Whether a task of the lease is finished and the budget is spent; 0 is no limit."""
        return bool(budget_s and self._done) and self._clock() - self._began >= budget_s

    def taken(self, tasks: Iterable[int]) -> dict[int, ins.TaskTime]:
        """Return the times of these tasks, where there are any, and forget them."""
        times = {
            task: ins.TaskTime(*self._tasks.pop(task, (0.0, 0.0)), self._pushes.pop(task, (0.0, 0.0))[1])
            for task in tasks
        }
        return {task: time for task, time in times.items() if time.compute_s + time.exchange_s > 0}
