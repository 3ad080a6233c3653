"""Batches of a dataset whose graph this process runs on the rows that it takes, in a thread ahead of the training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nfdt.core.arrays.layout import Array, RowSelection
from nfdt.core.work.instructions import Supply
from nfdt.model.training.data import BatchSource
from nfdt.model.training.dataset_graph import DatasetGraph
from nfdt.model.training.dataset_run import DatasetRun, Take, check_files
from nfdt.model.training.host_batches import as_batch

POLL_S = 1.0
AHEAD = 2
JOIN_S = 10.0


class BatchReader:
    """Reader of the batches of one iteration after the other.

    Args:
        iterate: Begins an iteration, given its number.
        stopped: Set when the job is over for this worker.

    Attributes:
        iteration: Number of the current iteration; -1 before the first.
    """

    def __init__(self, iterate: Callable[[int], Iterator[Any]], stopped: threading.Event) -> None:
        self.iteration = -1
        self._iterate, self._stopped = iterate, stopped
        self._changed = threading.Condition()
        self._batches: deque[Any] = deque()
        self._over = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, iteration: int) -> None:
        """Continue the iteration with this number, or begin it and end the earlier one."""
        if iteration == self.iteration:
            return
        self.close()
        with self._changed:
            self._batches.clear()
            self._over, self._error, self.iteration = False, None, iteration
        self._thread = threading.Thread(target=self._read, args=(iteration,), name="batches", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> tuple[int, bool] | None:
        """Wait for a batch or the end; return the number of batches that wait, and whether no more will come.

        Returns:
            None after ``timeout_s`` without either.

        Raises:
            Exception: The dataset failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._batches or self._over or self._stopped.is_set(), timeout_s):
                return None
            if self._error is not None and not self._batches:
                raise self._error
            return len(self._batches), self._over

    def take(self) -> Any:
        """Return the next batch, which waits."""
        with self._changed:
            batch = self._batches.popleft()
            self._changed.notify_all()
        return batch

    def close(self) -> None:
        """End the current iteration."""
        with self._changed:
            self.iteration = -1
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None

    def _read(self, iteration: int) -> None:
        error: BaseException | None = None
        try:
            for batch in self._iterate(iteration):
                if not self._put(iteration, batch):
                    return
        except BaseException as raised:  # any exception of the user's graph fails the job, in the worker's own thread
            error = raised
        with self._changed:
            if self.iteration == iteration:
                self._over, self._error = True, error
            self._changed.notify_all()

    def _put(self, iteration: int, batch: Any) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.iteration != iteration or len(self._batches) < AHEAD)
            if self.iteration != iteration:
                return False
            self._batches.append(batch)
            self._changed.notify_all()
        return True


class GraphSource(BatchSource):
    """Source of the batches of one iteration after the other, which may go on over epochs; a thread is ahead.

    Args:
        graph: Graph of the dataset.
        arrays: Arrays of its sources.
        seed: Seed of the job.
        number: Number of this process in the job.
        take: Takes rows for this process.
        stopped: Set when the job is over for this process.
    """

    whole = True

    def __init__(
        self,
        graph: DatasetGraph,
        arrays: Sequence[Array],
        seed: int,
        number: int,
        take: Take,
        stopped: threading.Event,
    ) -> None:
        self._header, self._stopped = graph.header, stopped
        self._run = DatasetRun(graph, arrays, seed, number, take)
        self._reader = BatchReader(self._batches, stopped)

    def check(self) -> None:
        """Check the files that the dataset reads.

        Raises:
            UnreadableData: This machine lacks one.
        """
        check_files(self._header)

    def begin_iteration(self, iteration: int) -> None:
        """Continue the iteration with this number, or begin it."""
        self._reader.begin(iteration)

    def supply(self, waits: Callable[[], object]) -> Supply | None:
        """Wait for a batch or the end of the iteration; return what there is, None before the first iteration.

        ``waits`` is called about once a second meanwhile.

        Raises:
            Exception: The graph failed.
        """
        iteration = self._reader.iteration
        while iteration >= 0 and not self._stopped.is_set():
            if (found := self._reader.wait(POLL_S)) is not None:
                return Supply(iteration, *found)
            waits()
        return None

    def batch(self, rows: RowSelection) -> Any:
        """Return the next batch, whatever the rows; it has been reported as waiting."""
        return self._reader.take()

    def close(self) -> None:
        """End the iteration and its thread."""
        self._reader.close()

    def _batches(self, iteration: int) -> Iterator[Any]:
        return map(as_batch, self._run.iterate(iteration))
