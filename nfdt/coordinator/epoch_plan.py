"""The tasks, rounds and validation of each epoch, computed from the specification of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nfdt.core.order import order_crc
from nfdt.core.specs.job import EpochProgress, JobSpec
from nfdt.core.work.instructions import Supply
from nfdt.model.training.metric_states import merge_metric_states
from nfdt.schedulers.batch_policies import LocalSizes
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.pulled import PulledTasks, RowSplits
from nfdt.schedulers.sources import FedTasks, PlannedTasks, SizedTasks, TaskSource
from nfdt.schedulers.tasks import Position, TaskPlan


@dataclass(frozen=True)
class Epoch:
    """The tasks of one epoch.

    Attributes:
        book: Lease book of the tasks.
        steps: Number of steps; None for a stream of unknown length.
        order_crc: CRC-32 of the sample order of the job's pass 0; it detects workers with another order from NumPy;
            0 where NumPy draws none.
        ranks: Preferred part of a round for each worker.
        iteration: Number of the iteration over a dataset that workers run.
    """

    book: LeaseBook
    steps: int | None
    order_crc: int
    ranks: Mapping[str, int]
    iteration: int = 0


class DatasetEpochs:
    """The iterations of a dataset.

    As in Keras, an epoch is an iteration. With ``steps_per_epoch`` an iteration goes on over epochs until it is over.

    Args:
        spec: The job.

    Attributes:
        splits: Rows of the current iteration, which workers take.
    """

    def __init__(self, spec: JobSpec) -> None:
        assert spec.train.rows is not None
        self._steps = spec.fit.steps_per_epoch
        self._batches = spec.train.batches
        self.splits = RowSplits(spec.train.rows, spec.train.split)
        self._tasks: PulledTasks | None = None
        self._trained = 0  # batches of the iteration, in earlier epochs

    @property
    def steps(self) -> int | None:
        """Number of steps of an epoch; None: unknown."""
        return self._batches if self._steps is None else self._steps

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
            self.splits.begin(0 if last is None else self.splits.iteration + 1)
            self._trained = 0
        self._tasks = PulledTasks(self._steps, None if last is None else last.end_position)
        return self._tasks

    def report(self, worker: str, supply: Supply) -> None:
        """Record the batches that a worker has."""
        if self._tasks is not None and supply.iteration == self.splits.iteration:
            self._tasks.report(worker, supply.waiting, supply.over)

    def _is_over(self, tasks: PulledTasks) -> bool:
        return tasks.ran_out or (self._batches is not None and self._trained >= self._batches)


class EpochPlanner:
    """Builder of each epoch's lease book; stores the position at which the next epoch begins.

    Args:
        spec: The job.
        synchronous: Whether workers train in rounds.
        restorable: Whether the server takes snapshots of the shards of flat topologies.

    Attributes:
        spec: The job, with the batch sizes of the epochs that begin from now on; their data and order do not change.
        dataset: Iterations of a dataset that workers run; None for other data.
        position: Position at which the next epoch begins; None: that of the first one.
    """

    def __init__(self, spec: JobSpec, synchronous: bool, *, restorable: bool = False) -> None:
        self.spec = spec
        self._synchronous = synchronous
        self._restorable = restorable
        self.position: Position | None = None
        self.dataset = DatasetEpochs(spec) if spec.train.rows is not None else None
        drawn = spec.method == "fit" and spec.train.planned and spec.fit.shuffle and not spec.fit.block
        self._order_crc = order_crc(spec.sample_order(0)) if drawn else 0

    def begin(
        self, epoch: int, parts: int, workers: Sequence[str], feed: FedTasks | None, sizes: LocalSizes | None = None
    ) -> Epoch:
        """Return the epoch's tasks for these workers; ``parts`` local batches form a round.

        ``feed`` is the queue of a stream; ``sizes`` gives batch sizes that change.
        """
        ranks = {name: rank for rank, name in enumerate(workers)}
        if self.spec.method != "fit":
            return Epoch(LeaseBook(PlannedTasks(TaskPlan(self.spec.train.planned or 0, 1, steps=0))), 0, 0, ranks)
        if feed is not None:
            feed.parts = parts
            return Epoch(self._book(feed, rounds=self._synchronous), self.spec.train.batches, 0, ranks)
        if (dataset := self.dataset) is not None:
            return Epoch(self._book(dataset.begin(), counted=True), dataset.steps, 0, ranks, dataset.splits.iteration)
        round_steps = sizes.round_steps if sizes is not None and self._synchronous else 1
        plan = self._plan(epoch, parts, round_steps)
        return self._planned(epoch, plan, ranks, sizes)

    def overlaps(self, epoch: int) -> bool:
        """Whether this epoch may begin while the end of the one before is not processed: its tasks are known."""
        spec, facts = self.spec, self.spec.algorithm.consistency_facts
        known = spec.method == "fit" and spec.train.planned is not None and self.dataset is None
        return known and self._keeps and facts.independent and epoch < spec.fit.epochs

    @property
    def next_task(self) -> int:
        """Number above those of all tasks of the epochs that have begun."""
        return (self.position or self._first_position(0)).task

    def beginning(self, epoch: int) -> EpochProgress | None:
        """Return the state of an epoch before it begins; None: it begins with the job, or its rows have no numbers."""
        if not self._keeps or self.spec.train.planned is None:
            return None
        return self._begun(epoch) if self.position is None else self._progress_at(epoch, self.position)

    def _planned(self, epoch: int, plan: TaskPlan, ranks: Mapping[str, int], sizes: LocalSizes | None) -> Epoch:
        """Plan steps of batches of one size, or of as many rows: a round, or b0."""
        begun = self._begun(epoch) or self._progress_at(epoch, plan.begin)
        # book.skip() below drops the trained rounds again, and numbers the others from there on.
        dropped = _source(plan, sizes).skip(begun.rows)
        plan = replace(plan, begin=replace(plan.begin, round=begun.round + 1 - dropped))
        source = _source(plan, sizes)
        if isinstance(source, SizedTasks):
            self.position, ranks = SizedTasks.end(plan), source.ranks
            step = plan.round_rows // plan.round_steps * plan.row_samples
            options = {"step_samples": step, "counted": not self.spec.train.sized}
            book = self._book(source, rounds=self._synchronous, **options)
        else:
            self.position = plan.end
            book = self._book(source, rounds=self._synchronous, counted=not self.spec.train.sized)
        book.skip(begun, plan.row_samples)
        return Epoch(book, plan.step_count, self._order_crc, ranks)

    def _progress_at(self, epoch: int, begin: Position) -> EpochProgress:
        """Return the progress of an epoch that has not begun."""
        rows = ((begin.pass_index, begin.row, begin.row),)
        return EpochProgress(epoch=epoch, round=begin.round - 1 if self._synchronous else 0, rows=rows)

    def _book(self, source: TaskSource, **options: Any) -> LeaseBook:
        return LeaseBook(source, keeps=self._keeps, **options)

    @property
    def _keeps(self) -> bool:
        return self._restorable and self.spec.algorithm.topology_facts.flat

    def _begun(self, epoch: int) -> EpochProgress | None:
        """Return the progress of the first epoch of a restarted job; None for others.

        Its rounds are numbered from 1 if the shards have no records of earlier ones.
        """
        begun = self.spec.fit.begun
        if begun is None or not begun.epoch == epoch == self.spec.fit.initial_epoch:
            return None
        return begun if begun.records else begun.model_copy(update={"round": 0})

    def next_feed(self, last: FedTasks | None = None) -> FedTasks | None:
        """Return the queue of the next epoch's batches, after ``last``; None if the training data are no stream."""
        if self.spec.train.kind != "stream":
            return None
        if last is not None:
            self.position = last.end_position
        return FedTasks(begin=self.position, synchronous=self._synchronous)

    @property
    def join(self) -> Callable[[Sequence[bytes]], bytes] | None:
        """Function that joins the workers' answers to the result of a job that only evaluates; None: the job trains."""
        return {"evaluate": merge_metric_states, "predict": b"\n".join}.get(self.spec.method)

    def validation(self, epoch: int) -> LeaseBook | None:
        """Return the rows to evaluate after this epoch; None if workers have nothing to validate."""
        data, fit = self.spec.validation, self.spec.fit
        if data is None or data.planned is None or not self._validates(epoch):
            return None
        plan = TaskPlan(data.planned, fit.validation_batch_size or fit.batch_size if data.sized else 1)
        if fit.validation_steps is not None:
            plan = replace(plan, steps=min(len(plan), fit.validation_steps))
        return LeaseBook(PlannedTasks(plan))

    def _validates(self, epoch: int) -> bool:
        frequency = self.spec.fit.validation_freq
        if isinstance(frequency, int):
            return (epoch + 1) % frequency == 0
        return epoch + 1 in frequency

    def _plan(self, epoch: int, parts: int, round_steps: int) -> TaskPlan:
        """Return the plan of an epoch; a round has ``round_steps`` batches of each of ``parts`` workers."""
        fit = self.spec.fit
        steps = fit.steps_per_epoch
        begin = self.position or self._first_position(epoch)
        rows, sized = self.spec.train.planned or 0, self.spec.train.sized
        if steps is not None and round_steps > 1:  # an epoch has whole rounds
            round_steps = max(count for count in range(1, round_steps + 1) if steps % count == 0)
            steps //= round_steps
        batch, row_samples = (fit.batch_size, 1) if sized else (1, fit.batch_size)
        options = {"row_samples": row_samples, "round_steps": round_steps}
        return TaskPlan(rows, batch * round_steps, parts, steps, begin, self._synchronous, **options)

    def _first_position(self, epoch: int) -> Position:
        """Return the position of the first epoch: in a restarted job, that of the first row of its progress."""
        steps, begun = self.spec.fit.steps_per_epoch, self._begun(epoch)
        if begun is None or not begun.rows:
            return Position(epoch if steps is None else 0, task=begun.task if begun is not None else 0)
        pass_index, row, _ = begun.rows[0]
        return Position(pass_index, 0 if steps is None else row, begun.task)


def _source(plan: TaskPlan, sizes: LocalSizes | None) -> PlannedTasks | SizedTasks:
    return PlannedTasks(plan) if sizes is None else SizedTasks(plan, sizes)
