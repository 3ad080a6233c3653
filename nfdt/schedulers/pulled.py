"""Tasks of workers that run the dataset's graph: the batches they have made, and the splits of rows they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nfdt.schedulers.sources import TaskSource
from nfdt.schedulers.tasks import Position, Task


@dataclass
class _Stock:
    """Last report of a worker: its batches that wait, and whether no more will come."""

    waiting: int = 0
    over: bool = False

    @property
    def exhausted(self) -> bool:
        return self.over and not self.waiting


class PulledTasks(TaskSource):
    """Tasks of one epoch without content: each is the next batch of the worker that leases it.

    The epoch ends after ``steps``, or when every worker that takes part has no more batches.

    Args:
        steps: Maximum number of steps; None: no limit.
        begin: Position at which the epoch begins.

    Attributes:
        issued: Number of batches leased, without returned ones.
    """

    repeatable = False

    def __init__(self, steps: int | None = None, begin: Position | None = None) -> None:
        self._steps = steps
        self.issued = 0
        self._begin = begin or Position()
        self._next = self._begin.task
        self._stocks: dict[str, _Stock] = {}
        self._dropped = False

    # ---- reports of workers

    def join(self, worker: str) -> None:
        """Let a worker take part; until it reports, it may have batches."""
        self._stocks[worker] = _Stock()

    def report(self, worker: str, waiting: int, over: bool) -> None:
        """Record the batches that wait at a worker and are not leased, and whether no more will come."""
        if worker in self._stocks:
            self._stocks[worker] = _Stock(waiting, over)

    @property
    def ran_out(self) -> bool:
        """Whether the workers have no more batches."""
        return bool(self._stocks) and all(stock.exhausted for stock in self._stocks.values())

    # ---- TaskSource

    def take(self, worker: str, limit: int) -> list[Task]:
        """Lease up to ``limit`` of the batches that wait at this worker."""
        stock = self._stocks.get(worker)
        count = min(limit, stock.waiting, self._left) if stock is not None and not self._dropped else 0
        if stock is None or count < 1:
            return []
        stock.waiting -= count
        tasks = [Task(self._next + index, 0, 0) for index in range(count)]
        self._next += count
        self.issued += count
        return tasks

    def take_round(self) -> list[Task]:
        """Return nothing: batches of workers form no rounds."""
        return []

    def returned(self, tasks: Sequence[Task]) -> Sequence[Task]:
        """Take tasks back; no other worker can train their batches.

        A batch that was not begun waits at its worker, or is lost with it. One that was trained cannot be made again:
        if its update is lost, it is missing in the epoch. Of a given number of steps, another batch takes its place.
        """
        self.issued -= len(tasks)
        return ()

    def release(self, worker: str) -> None:
        """Forget a lost worker."""
        self._stocks.pop(worker, None)

    def drop(self) -> None:
        """End the epoch after the leased tasks."""
        self._dropped = True

    def available(self, worker: str) -> bool:
        """Whether a batch waits at this worker; "" stands for any worker."""
        if self._dropped or not self._left:
            return False
        stocks = [self._stocks.get(worker)] if worker else self._stocks.values()
        return any(stock is not None and stock.waiting for stock in stocks)

    def exhausted(self, worker: str) -> bool:
        """Whether the worker gets no more tasks in this epoch."""
        stock = self._stocks.get(worker)
        return self.finished or (stock is not None and stock.exhausted)

    @property
    def remaining(self) -> int:
        """Number of steps left, else of batches that wait."""
        if self._dropped:
            return 0
        waiting = sum(stock.waiting for stock in self._stocks.values())
        return waiting if self._steps is None else self._left

    @property
    def finished(self) -> bool:
        """Whether no task is left or will come."""
        return self._dropped or not self._left or self.ran_out

    @property
    def end_position(self) -> Position:
        """Position at which the numbers of the next epoch begin."""
        return Position(0, 0, self._next, self._begin.round)

    @property
    def _left(self) -> int:
        # Any number that no epoch reaches stands for no limit.
        return 2**62 if self._steps is None else max(0, self._steps - self.issued)


class RowSplits:
    """The rows of one iteration after the other; each row of a pass is given to one worker, once.

    A pass is one reading of the rows; a dataset with ``repeat`` has several in an iteration, and workers may be in
    different ones. The rows of a lost worker are not given again.

    Args:
        rows: Rows of a pass.
        size: Rows of a split; the last one of a pass may have fewer.

    Attributes:
        iteration: Number of the current iteration.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.iteration = 0
        self._rows, self._size = rows, size
        self._next: dict[int, int] = {}
        self._last: dict[str, tuple[tuple[int, int], range | None]] = {}  # request and answer of each worker

    def begin(self, iteration: int) -> None:
        """Begin an iteration; requests of earlier ones get nothing more."""
        self.iteration = iteration
        self._next.clear()
        self._last.clear()

    def remove(self, worker: str) -> None:
        """Remove a lost worker; the rows that it has taken are not given again."""
        self._last.pop(worker, None)

    def take(self, worker: str, iteration: int, pass_index: int, number: int) -> range | None:
        """Give the worker rows of a pass; None: all rows of the pass are taken, or the iteration is over.

        ``number`` counts the worker's requests of a pass: one that is repeated gets the same answer.
        """
        if iteration != self.iteration:
            return None
        answered, answer = self._last.get(worker, (None, None))
        request = pass_index, number
        if request == answered:
            return answer
        begin = self._next.get(pass_index, 0)
        split = range(begin, min(begin + self._size, self._rows)) or None
        self._next[pass_index] = split.stop if split else self._rows
        self._last[worker] = request, split
        return split
