"""Batches of a dataset whose graph runs in this process, in a thread that reads ahead of the training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.arrays.layout import Array, RowSelection
from nfdt.core.work.instructions import Supply
from nfdt.model.training.data import BatchSource
from nfdt.model.training.dataset_graph import DatasetGraph
from nfdt.model.training.dataset_run import DatasetRun, Take
from nfdt.model.training.host_batches import as_batch

POLL_S = 1.0  # between two calls of ``waits``
AHEAD = 2  # batches that wait at most
JOIN_S = 10.0  # wait for the thread, which may be inside of the user's code


@dataclass(frozen=True)
class RowTaker:
    """Access of this process to the rows of a dataset.

    Attributes:
        number: Number of this process in the job.
        take: Takes rows.
        stopped: Set when the job is over for this process.
    """

    number: int
    take: Take
    stopped: threading.Event


class GraphSource(BatchSource):
    """Batches of a dataset, one iteration after another; an iteration may span epochs. A thread reads ahead.

    Args:
        graph: Graph of the dataset.
        arrays: Arrays of its sources.
        seed: Seed of the job.
        rows: Access of this process to the rows.
    """

    whole = True

    def __init__(self, graph: DatasetGraph, arrays: Sequence[Array], seed: int, rows: RowTaker) -> None:
        self._run = DatasetRun(graph, arrays, seed, rows.number, rows.take)
        self._stopped = rows.stopped
        self._iteration = -1
        self._changed = threading.Condition()
        self._batches: deque[Any] = deque()
        self._over = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin_iteration(self, iteration: int) -> None:
        """Continue the iteration with this number, or begin it and end the earlier one."""
        if iteration == self._iteration:
            return
        self.close()
        with self._changed:
            self._batches.clear()
            self._over, self._error, self._iteration = False, None, iteration
        self._thread = threading.Thread(target=self._read, args=(iteration,), name="batches", daemon=True)
        self._thread.start()

    def supply(self, waits: Callable[[], object]) -> Supply | None:
        """Wait for a batch or the end of the iteration; return the supply, None before the first iteration.

        ``waits`` is called about once a second meanwhile.

        Raises:
            Exception: The graph failed.
        """
        iteration = self._iteration
        while iteration >= 0 and not self._stopped.is_set():
            with self._changed:
                if self._changed.wait_for(lambda: self._batches or self._over or self._stopped.is_set(), POLL_S):
                    if self._error is not None and not self._batches:
                        raise self._error
                    return Supply(iteration, len(self._batches), self._over)
            waits()
        return None

    def batch(self, rows: RowSelection) -> Any:
        """Return the next batch, whatever the rows; it has been reported as waiting."""
        with self._changed:
            batch = self._batches.popleft()
            self._changed.notify_all()
        return batch

    def close(self) -> None:
        """End the iteration and its thread."""
        with self._changed:
            self._iteration = -1
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None

    def _read(self, iteration: int) -> None:
        error: BaseException | None = None
        try:
            for batch in self._run.iterate(iteration):
                if not self._put(iteration, as_batch(batch)):
                    return
        except BaseException as raised:  # any exception of the user's graph fails the job, in the worker's own thread
            error = raised
        with self._changed:
            if self._iteration == iteration:
                self._over, self._error = True, error
            self._changed.notify_all()

    def _put(self, iteration: int, batch: Any) -> bool:
        """Add a batch once there is room; return False if another iteration has begun, or this one was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._iteration != iteration or len(self._batches) < AHEAD)
            if self._iteration != iteration:
                return False
            self._batches.append(batch)
            self._changed.notify_all()
        return True
