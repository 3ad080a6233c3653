"""Sources of tasks before they are leased: the rows of an epoch, in batches of any size, or a client's queue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from nfdt.schedulers.batch_policies import LocalSizes
from nfdt.schedulers.ranges import Ranges, RowRange, RowSet
from nfdt.schedulers.tasks import Position, Task, TaskPlan

LEASE_BYTES = 32 * 2**20
"""Largest amount of streamed batches in a lease of several."""


class TaskSource(ABC):
    """Unleased tasks by rounds (an asynchronous round is one task).

    The methods with a body are those of tasks that any worker can compute, and that have no row numbers.

    Attributes:
        repeatable: Whether a worker can compute a task that another one has taken.
    """

    repeatable: ClassVar[bool] = True

    @abstractmethod
    def take(self, worker: str, limit: int) -> list[Task]:
        """Take the tasks of up to ``limit`` rounds for this worker."""

    @abstractmethod
    def take_round(self) -> list[Task]:
        """Take all parts of the next round; empty if it is not available (yet)."""

    @abstractmethod
    def drop(self) -> None:
        """Discard all remaining tasks."""

    @abstractmethod
    def available(self, worker: str) -> bool:
        """Whether :meth:`take` would return a task for this worker now."""

    @property
    @abstractmethod
    def remaining(self) -> int:
        """Number of remaining rounds, as far as known."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no task is left or will come."""

    def exhausted(self, worker: str) -> bool:
        """Whether no task is left or will come for this worker (unless another one leaves)."""
        return self.finished

    @property
    def rows(self) -> tuple[int, range] | None:
        """The pass of the epoch and its rows; None: the data of a task have no row numbers."""
        return None

    def join(self, worker: str) -> None:
        """Let a worker take part in the epoch."""
        return

    def returned(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Take tasks back, as if they had never been taken; return those that any worker may compute."""
        return tasks

    def skip(self, trained: Sequence[RowRange]) -> int:
        """Drop these rows before the first task is taken; return the number of rounds that are dropped."""
        return 0

    def divide(self, weights: Mapping[str, float]) -> None:
        """Reserve the unleased tasks for these workers, in proportion, as far as they can be reserved."""
        return

    def release(self, worker: str) -> None:
        """Return the share of a lost worker to the pool of all others."""
        return


class RangedTasks(TaskSource):
    """Base class of the sources of a plan's rows: numbers of rounds or rows, in a pool or in workers' shares.

    Args:
        plan: Plan of the epoch.
        numbers: All numbers.
    """

    def __init__(self, plan: TaskPlan, numbers: range) -> None:
        self._plan = plan
        self._numbers = Ranges(numbers)

    def divide(self, weights: Mapping[str, float]) -> None:
        """Divide the numbers into contiguous shares."""
        self._numbers.divide(weights)

    def release(self, worker: str) -> None:
        """Return the worker's share to the pool."""
        self._numbers.release(worker)

    def drop(self) -> None:
        """Discard the pool and all shares."""
        self._numbers.drop()

    def available(self, worker: str) -> bool:
        """Whether the worker's share or the pool has numbers."""
        return self._numbers.has(worker)

    def exhausted(self, worker: str) -> bool:
        """Whether the worker's share and the pool are empty."""
        return not self.available(worker)

    @property
    def rows(self) -> tuple[int, range]:
        """The pass of the epoch and its rows."""
        return self._plan.rows

    @property
    def finished(self) -> bool:
        """Whether every number has been taken."""
        return not len(self._numbers)


class PlannedTasks(RangedTasks):
    """The rounds of a plan, from a :class:`Ranges` of their indices."""

    def __init__(self, plan: TaskPlan) -> None:
        super().__init__(plan, range(len(plan)))
        self._trained = RowSet()

    def skip(self, trained: Sequence[RowRange]) -> int:
        """Drop the rounds whose rows are all trained; of others, tasks begin and end with an untrained row."""
        self._trained = RowSet(trained)
        pass_index, rows = self._plan.rows
        left: list[range] = []
        for gap in self._trained.missing(pass_index, rows):
            first = (gap.start - rows.start) // self._plan.round_rows
            last = (gap.stop - 1 - rows.start) // self._plan.round_rows
            left.append(range(max(first, left[-1].stop if left else 0), last + 1))
        self._numbers = Ranges(*left)
        return len(self._plan) - len(self._numbers)

    def take(self, worker: str, limit: int) -> list[Task]:
        """Take up to ``limit`` tasks of this worker's share, else of the pool."""
        return [task for index in self._numbers.take(worker, limit) for task in self._round(index)]

    def take_round(self) -> list[Task]:
        """Take all parts of the next round."""
        return self.take("", 1)

    @property
    def remaining(self) -> int:
        """Number of remaining rounds."""
        return len(self._numbers)

    def _round(self, index: int) -> Sequence[Task]:
        """Return the tasks of a round without trained rows at their ends; without those that are trained."""
        if not self._trained.ranges:
            return self._plan.round(index)
        tasks = [
            replace(task, start=gaps[0].start, stop=gaps[-1].stop)
            for task in self._plan.round(index)
            if (gaps := self._trained.missing(task.pass_index, range(task.start, task.stop)))
        ]
        size = self._plan.row_samples
        return [
            replace(task, part=part, parts=len(tasks), samples=(task.stop - task.start) * size)
            for part, task in enumerate(tasks)
        ]


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
        while len(tasks) < limit:
            rows = self._numbers.take(worker, self._sizes.next(worker, len(self._numbers)))
            if not rows:
                break
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
        samples = len(rows) * self._plan.row_samples
        task = Task(self._next, rows.start, rows.stop, self._pass_index, samples=samples)
        self._next += 1
        return task


class FedTasks(TaskSource):
    """Batches in the order in which a client feeds them; a synchronous round is ``parts`` consecutive ones.

    ``parts`` may be set until the first round is taken; ``accepted`` counts the batches fed, ``accepted_bytes`` theirs.
    """

    def __init__(self, parts: int = 1, begin: Position | None = None, synchronous: bool = False) -> None:
        self.parts = parts
        self.accepted = self.accepted_bytes = 0
        self._synchronous = synchronous
        begin = begin or Position()
        self._next = begin.task
        self._round = begin.round
        self._queue: deque[Task] = deque()
        self._ended = False

    def feed(self, data: bytes, samples: int) -> None:
        """Queue one more batch; ignore it after the end or :meth:`drop`."""
        if self._ended:
            return
        self._queue.append(Task(self._next, 0, samples, data=data, samples=samples))
        self._next += 1
        self.accepted += 1
        self.accepted_bytes += len(data)

    def end(self) -> None:
        """Record that no more batches will come."""
        self._ended = True

    def take(self, worker: str, limit: int) -> list[Task]:
        """Take up to ``limit`` of the queued batches, and of at most ``LEASE_BYTES``; one may be larger."""
        taken: list[Task] = []
        left = LEASE_BYTES
        while self._queue and len(taken) < limit and (not taken or len(self._queue[0].data) <= left):
            taken.append(self._queue.popleft())
            left -= len(taken[-1].data)
        return taken

    def take_round(self) -> list[Task]:
        """Take the next ``parts`` batches; fewer only at the end."""
        if not self._queue or (len(self._queue) < self.parts and not self._ended):
            return []
        tasks = [self._queue.popleft() for _ in range(min(self.parts, len(self._queue)))]
        number = self._round if self._synchronous else 0
        self._round += 1
        return [replace(task, round=number, part=part, parts=len(tasks)) for part, task in enumerate(tasks)]

    def drop(self) -> None:
        """Discard the queue and refuse further batches."""
        self._queue.clear()
        self._ended = True

    def available(self, worker: str) -> bool:
        """Whether a batch is queued."""
        return bool(self._queue)

    @property
    def remaining(self) -> int:
        """Number of queued batches."""
        return len(self._queue)

    @property
    def finished(self) -> bool:
        """Whether the feed has ended and nothing is queued."""
        return self._ended and not self._queue

    @property
    def end_position(self) -> Position:
        """Position at which the numbers of the next epoch begin."""
        return Position(0, 0, self._next, self._round)
