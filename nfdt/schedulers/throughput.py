"""How long a task takes, as far as anybody has measured."""

from __future__ import annotations

KEEP = 0.7


class TaskSeconds:
    """Exponential mean (decay 0.7) of seconds per task, one per worker.

    A worker's first measurement is dropped: its first step traces and compiles.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float | None] = {}

    def measured(self, worker: str, seconds: float, tasks: int) -> None:
        """``tasks`` tasks took the worker ``seconds`` in all."""
        per_task = max(seconds, 1e-9) / max(tasks, 1)
        if worker not in self._seconds:
            self._seconds[worker] = None
            return
        before = self._seconds[worker]
        self._seconds[worker] = per_task if before is None else KEEP * before + (1 - KEEP) * per_task

    def of(self, worker: str) -> float | None:
        """Seconds per task of this worker; None before it is known."""
        return self._seconds.get(worker)

    def forget(self, worker: str) -> None:
        """The worker is gone."""
        self._seconds.pop(worker, None)


def lease_size(remaining: int, workers: int, task_s: float | None, *, target_s: float = 0.2, most: int = 64) -> int:
    """How many tasks to lease at once: guided self-scheduling with a cap in time.

    At most ``remaining / (2 * workers)``, so that the tail is shared in small pieces; at most
    ``target_s`` worth of tasks, so that a lost lease costs little and progress is seen; 1 until
    ``task_s`` is known.
    """
    if task_s is None:
        return 1
    cap = min(most, max(1, int(target_s / task_s)))
    return min(cap, max(1, remaining // (2 * max(1, workers))))
