"""Tasks that are cut on request, each in the current batch size of its worker (dynamic batch sizes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nfdt.schedulers.batch_policies import LocalSizes
from nfdt.schedulers.ranges import Ranges, RowRange, RowSet
from nfdt.schedulers.sources import RangedTasks
from nfdt.schedulers.tasks import Position, Task, TaskPlan


class SizedTasks(RangedTasks):
    """The rows of a plan's epoch, each exactly once, in batches whose sizes are not known in advance.

    A synchronous round holds as many rows as the plan's rounds, one part per worker. An asynchronous batch holds the
    current batch size of its worker, and fewer rows only at the end of the rows (or of the worker's share).

    Args:
        plan: Plan of the rows and of the number of rows in a round.
        sizes: Batch size of each worker; it may change at any time.

    Attributes:
        ranks: Preferred part of the last round for each worker.
    """

    def __init__(self, plan: TaskPlan, sizes: LocalSizes) -> None:
        self._pass_index, rows = plan.rows
        super().__init__(plan, rows)
        self._sizes = sizes
        self._next = plan.begin.task
        self._round = plan.begin.round
        self.ranks: dict[str, int] = {}

    @staticmethod
    def end(plan: TaskPlan) -> Position:
        """Return the position of the next epoch; it skips as many task numbers as there could be tasks."""
        _, rows = plan.rows
        return replace(plan.end, task=plan.begin.task + len(rows))

    def skip(self, trained: Sequence[RowRange]) -> int:
        """Drop the trained rows; return the number of rounds that they make up. The numbers of rounds go on."""
        before = self.remaining
        self._numbers = Ranges(*RowSet(trained).missing(*self._plan.rows))
        dropped = before - self.remaining
        self._round += dropped
        return dropped

    def take(self, worker: str, limit: int) -> list[Task]:
        """Take up to ``limit`` batches of this worker's share, else of the pool."""
        tasks: list[Task] = []
        while len(tasks) < limit and (rows := self._numbers.take(worker, self._sizes.of(worker))):
            tasks.append(self._task(rows))
        return tasks

    def take_round(self) -> list[Task]:
        """Take the next round, divided among the current workers."""
        rows = self._numbers.take("", self._plan.round_rows)
        if not rows:
            return []
        parts = self._sizes.split(len(rows))
        self.ranks.clear()
        self.ranks.update((worker, part) for part, (worker, _) in enumerate(parts) if worker)
        tasks, start = [], 0
        for part, (_, count) in enumerate(parts):
            task = self._task(rows[start : start + count])
            tasks.append(replace(task, round=self._round, part=part, parts=len(parts)))
            start += count
        self._round += 1
        return tasks

    @property
    def remaining(self) -> int:
        """Number of rounds (asynchronous: of batches of b0) that the remaining rows would form."""
        return -(-len(self._numbers) // self._plan.round_rows)

    def _task(self, rows: range) -> Task:
        task = Task(self._next, rows.start, rows.stop, self._pass_index, samples=len(rows))
        self._next += 1
        return task
