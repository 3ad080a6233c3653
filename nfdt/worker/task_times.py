"""Durations of a worker's tasks: wall time of each, and its part of computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nfdt.core.work.instructions import TaskTime


@dataclass
class FinishedTask:
    """A task whose push has been answered.

    Attributes:
        task: Number of the task.
        samples: Number of samples of the task.
        compute_s: Seconds of computation, set by :meth:`TaskTimes.fill`.
        exchange_s: Other seconds, mostly communication that no computation hides; set at the same time.
    """

    task: int
    samples: int = 0
    compute_s: float = 0.0
    exchange_s: float = 0.0


class TaskTimes:
    """Times of a worker's tasks, lease after lease; a task may be reported with a later lease than its own.

    Args:
        clock: Function that returns the worker's time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tasks: dict[int, tuple[float, float]] = {}
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

    def over(self, budget_s: float) -> bool:
        """Whether a task of the lease is finished and the budget is spent; 0 is no limit."""
        return bool(budget_s and self._done) and self._clock() - self._began >= budget_s

    def fill(self, finished: Iterable[FinishedTask]) -> None:
        """Move the times of each task into its entry."""
        for done in finished:
            done.compute_s, done.exchange_s = self._tasks.pop(done.task, (0.0, 0.0))


def report_finished(finished: Iterable[FinishedTask], times: TaskTimes) -> dict[str, Any]:
    """Return the fields of a report (:class:`~nfdt.core.work.instructions.Report`) about finished tasks."""
    done = tuple(finished)
    times.fill(done)
    return {
        "finished": tuple(d.task for d in done),
        "samples": {d.task: d.samples for d in done},
        "times": {d.task: TaskTime(d.compute_s, d.exchange_s) for d in done if d.compute_s + d.exchange_s > 0},
    }
