"""Epochs over a dataset that workers run: its iterations, the rows of each, and the batches that workers have."""

from __future__ import annotations

from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import Supply
from nfdt.schedulers.pulled import PulledTasks, RowSplit, RowSplits


class DatasetEpochs:
    """The iterations of a dataset.

    As in Keras, an epoch is an iteration. With ``steps_per_epoch`` an iteration goes on over epochs until it is over.

    Args:
        spec: The job.
    """

    def __init__(self, spec: JobSpec) -> None:
        assert spec.train.rows is not None
        self._steps = spec.fit.steps_per_epoch
        self._batches = spec.train.batches
        self._splits = RowSplits(spec.train.rows, spec.train.split)
        self._tasks: PulledTasks | None = None
        self._trained = 0  # batches of the iteration, in earlier epochs

    @property
    def steps(self) -> int | None:
        """Number of steps of an epoch; None: unknown."""
        return self._batches if self._steps is None else self._steps

    @property
    def iteration(self) -> int:
        """Number of the current iteration."""
        return self._splits.iteration

    @property
    def ran_out(self) -> bool:
        """Whether the data ended before the steps of the epoch."""
        tasks = self._tasks
        return tasks is not None and self._steps is not None and tasks.ran_out and tasks.issued < self._steps

    def begin(self) -> PulledTasks:
        """Return the tasks of the next epoch; begin an iteration if it needs one."""
        last = self._tasks
        if last is not None:
            self._trained += last.issued
        if last is None or self._steps is None or self._is_over(last):
            self._splits.begin(0 if last is None else self.iteration + 1)
            self._trained = 0
        self._tasks = PulledTasks(self._steps, None if last is None else last.end_position)
        return self._tasks

    def report(self, worker: str, supply: Supply) -> None:
        """Record the batches that a worker has."""
        if self._tasks is not None and supply.iteration == self.iteration:
            self._tasks.report(worker, supply.waiting, supply.over)

    def take_rows(self, worker: str, iteration: int, pass_index: int, number: int) -> RowSplit | None:
        """Give the worker rows; see :meth:`~nfdt.schedulers.pulled.RowSplits.take`."""
        return self._splits.take(worker, iteration, pass_index, number)

    def forget(self, worker: str) -> None:
        """Forget a lost worker."""
        self._splits.forget(worker)

    def _is_over(self, tasks: PulledTasks) -> bool:
        return tasks.ran_out or (self._batches is not None and self._trained >= self._batches)
