"""The tasks, rounds and validation of each epoch, computed from the specification of the job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nfdt.coordinator.dataset_epochs import DatasetEpochs
from nfdt.core.specs.job import JobSpec
from nfdt.schedulers import (
    FedTasks,
    LeaseBook,
    PlannedTasks,
    Position,
    SizedTasks,
    TaskPlan,
    order_crc,
    sample_order,
)
from nfdt.schedulers.local_sizes import LocalSizes


@dataclass(frozen=True)
class Epoch:
    """The tasks of one epoch.

    Attributes:
        book: Lease book of the tasks.
        steps: Number of steps; None for a stream of unknown length.
        order_crc: CRC-32 of the sample order of the job's pass 0; it detects workers with another order from NumPy;
            0 for streams.
        ranks: Preferred part of a round for each worker.
        iteration: Number of the iteration over a dataset that workers run.
    """

    book: LeaseBook
    steps: int | None
    order_crc: int
    ranks: Mapping[str, int]
    iteration: int = 0


class EpochPlanner:
    """Builder of each epoch's lease book; stores the position at which the next epoch begins.

    Attributes:
        dataset: Iterations of a dataset that workers run; None for other data.
    """

    def __init__(self, spec: JobSpec, synchronous: bool) -> None:
        self._spec = spec
        self._synchronous = synchronous
        self._position: Position | None = None
        self.dataset = DatasetEpochs(spec) if spec.train.rows is not None else None
        fit = spec.fit
        self._order_crc = order_crc(sample_order(spec.train.planned or 0, fit.shuffle, fit.seed, 0))

    def begin(
        self, epoch: int, parts: int, workers: Sequence[str], feed: FedTasks | None, sizes: LocalSizes | None = None
    ) -> Epoch:
        """Return the epoch's tasks for these workers; ``parts`` local batches form a round.

        ``feed`` is the queue of a stream; ``sizes`` gives batch sizes that change.
        """
        ranks = {name: rank for rank, name in enumerate(workers)}
        if feed is not None:
            feed.parts = parts
            return Epoch(LeaseBook(feed, rounds=self._synchronous), self._spec.train.batches, 0, ranks)
        if (dataset := self.dataset) is not None:
            return Epoch(LeaseBook(dataset.begin(), counted=True), dataset.steps, 0, ranks, dataset.iteration)
        plan = self._plan(epoch, parts)
        if sizes is not None:
            return self._cut(plan, sizes)
        self._position = plan.end
        book = LeaseBook(PlannedTasks(plan), rounds=self._synchronous, counted=not self._spec.train.sized)
        return Epoch(book, len(plan), self._order_crc, ranks)

    def _cut(self, plan: TaskPlan, sizes: LocalSizes) -> Epoch:
        """Plan steps of as many rows as with batches of one size: a round, or b0."""
        self._position = SizedTasks.end(plan)
        source = SizedTasks(plan, sizes)
        book = LeaseBook(source, rounds=self._synchronous, step_samples=plan.round_rows)
        return Epoch(book, len(plan), self._order_crc, source.ranks)

    def plan_with(self, spec: JobSpec) -> None:
        """Set the specification of the epochs that begin from now on; their data and order do not change."""
        self._spec = spec

    def feed(self) -> FedTasks | None:
        """Return the queue of the next epoch's batches, or None if the training data are no stream."""
        if self._spec.train.kind != "stream":
            return None
        return FedTasks(begin=self._position, synchronous=self._synchronous)

    def feed_over(self, feed: FedTasks | None) -> None:
        """End the epoch that ``feed`` served: the next one continues its numbering."""
        if feed is not None:
            self._position = feed.end_position

    def validation(self, epoch: int) -> LeaseBook | None:
        """Return the rows to evaluate after this epoch; None if workers have nothing to validate."""
        data, fit = self._spec.validation, self._spec.fit
        if data is None or data.planned is None or not self._validates(epoch):
            return None
        plan = TaskPlan(data.planned, fit.validation_batch_size or fit.batch_size if data.sized else 1)
        if fit.validation_steps is not None:
            plan = replace(plan, steps=min(len(plan), fit.validation_steps))
        return LeaseBook(PlannedTasks(plan))

    def _validates(self, epoch: int) -> bool:
        frequency = self._spec.fit.validation_freq
        if isinstance(frequency, int):
            return (epoch + 1) % frequency == 0
        return epoch + 1 in frequency

    def _plan(self, epoch: int, parts: int) -> TaskPlan:
        fit = self._spec.fit
        steps = fit.steps_per_epoch
        begin = self._position or Position(pass_index=epoch if steps is None else 0)
        rows = self._spec.train.planned or 0
        if self._spec.train.sized:
            return TaskPlan(rows, fit.batch_size, parts, steps, begin, self._synchronous)
        return TaskPlan(rows, 1, parts, steps, begin, self._synchronous, row_samples=fit.batch_size)
