"""Batches of a dataset whose graph this process runs on the rows that it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.row_selection import RowSelection
from nfdt.core.training.batch_reader import BatchReader
from nfdt.core.training.dataset_graph import DatasetGraph
from nfdt.core.training.dataset_run import DatasetRun, Take, check_files
from nfdt.core.training.host_batches import as_batch
from nfdt.core.work.instructions import Supply

POLL_S = 1.0


class GraphSource:
    """Source of the batches of one iteration after the other; a thread makes them ahead of the training.

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

    def prefetch(self, rows: Sequence[RowSelection]) -> None:
        """Do nothing: the reader is ahead."""

    def begin_epoch(self, epoch: int, first: int) -> None:
        """Do nothing: an epoch begins or continues an iteration."""

    def end_epoch(self) -> None:
        """Do nothing: an iteration may go on over epochs."""

    def close(self) -> None:
        """End the iteration and its thread."""
        self._reader.close()

    def _batches(self, iteration: int) -> Iterator[Any]:
        return map(as_batch, self._run.iterate(iteration))
