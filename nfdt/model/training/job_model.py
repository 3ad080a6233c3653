"""What every kind of worker has of a job: the model, its untrained state, data and metrics."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array, RowSelection
from nfdt.core.errors import PolicyRefused, ProtocolError, UsageError
from nfdt.core.order import order_crc
from nfdt.core.specs.job import MAX_WORKERS, JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.model.backends.contract import current
from nfdt.model.program import unpack
from nfdt.model.program.code import load_objects
from nfdt.model.program.local_optimizers import optimizer_state, stepping_parts
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.optimizer import inner_optimizer
from nfdt.model.program.untrained import untrained_variables
from nfdt.model.training import data
from nfdt.model.training.data import BatchSource
from nfdt.model.training.epoch_callbacks import SCHEDULE, EpochCallbacks, EpochEnd
from nfdt.model.training.graph_source import GraphSource, RowTaker
from nfdt.model.training.metrics import ModelMetrics
from nfdt.model.training.sources import changeable, open_source
from nfdt.model.training.steps import why_undivided
from nfdt.model.training.untrained_state import UntrainedState

logger = logging.getLogger(__name__)


class JobModel:
    """One job's model and data in one process.

    Args:
        spec: The job.
        manifest: Program of the job.
        read: Returns an artifact's bytes by its sha256.
        open_array: Returns an artifact that is a ``.npy`` file as an array.
        open_rows: The same for an array of which only some rows are needed; default: ``open_array``.
        number: Number of the worker in the job; determines its random seeds.
        owner: Returns the name of the worker for error messages.
        rows: Access of this process to the rows of a dataset; None: it cannot run datasets.
        model: The program's model with its initial state, if this process has it already.
        tables: As for :func:`nfdt.model.program.unpack.unpack_with_variables`.
        read_ranges: As there.

    Attributes:
        spec: The job; may be replaced by another one with the same program and data, see :meth:`use`.
        manifest: The program.
        model: Compiled, built Keras model.
        layout: Layout of its trainable variables.
        first_update: ``iterations`` of its optimizer at the start of the job.
        untrained: Untrained state of the worker.
        metrics: Metrics of the model.
        train: Training data; None where the client streams batches.
        validation: Validation data; None where there is none, or the client streams it.
    """

    def __init__(
        self,
        spec: JobSpec,
        manifest: Manifest,
        read: Callable[[str], bytes | memoryview],
        open_array: Callable[[str], Array],
        *,
        open_rows: Callable[[str], Array | data.RowArray] | None = None,
        number: int = 0,
        owner: Callable[[], str] = lambda: "worker",
        rows: RowTaker | None = None,
        model: Any = None,
        tables: Sequence[int] = (),
        read_ranges: unpack.ReadRanges | None = None,
    ) -> None:
        self.manifest, self._owner, self._read, self._number = manifest, owner, read, number
        self.model, self._outside = model, list[Any]()
        if model is None:
            self.model, self._outside = unpack.unpack_with_variables(
                manifest, read, allow_code=spec.code, tables=tables, read_ranges=read_ranges
            )
        self.layout = manifest.layout
        steps_here = stepping_parts(self.model, manifest) or [inner_optimizer(self.model)]
        self.first_update = int(steps_here[0].iterations)
        self.metrics = ModelMetrics(self.model)
        self.train = open_source(spec.train, spec, read, open_array, open_rows or open_array, rows)
        self.validation = open_source(spec.validation, spec, read, open_array, open_rows or open_array)
        named = {"train": (spec.train, self.train), "validation": (spec.validation, self.validation)}
        self._sources = [changeable(*named[name], read, open_array) for name in manifest.sources_by_value]
        self.untrained = self.untrained_of(number)
        self.use(spec)

    def use(self, spec: JobSpec) -> None:
        """Switch to another job with the same program and data."""
        self.spec = spec
        self._order = lru_cache(maxsize=2)(spec.sample_order)

    def copies(self, devices: Sequence[str], tables: Sequence[int]) -> list[Any]:
        """Return the model once more on each device but the first, with seeds of its own, where steps need that.

        ``tables``: variables, by index, that are exchanged by rows.

        Raises:
            UsageError: the job asks for several devices, on which a step of this program cannot be computed.
        """
        backend, spec = current(), self.spec
        if len(devices) < 2 or not backend.copies_models:
            return []
        if reason := why_undivided(self.model, self.manifest, tables, self._outside):
            if isinstance(asked := spec.cluster.devices_per_worker, int):
                raise UsageError(
                    f"devices_per_worker={asked}: expected 1 for this model on {backend.name}. Received: a model of "
                    f"which {reason}. Leave the option out, or train it with Keras on JAX."
                )
            logger.warning("%s computes on %s alone: %s.", self._owner(), devices[0], reason)
            return []
        found = []
        for number, device in enumerate(devices[1:], start=1):
            with backend.on(device):
                model = unpack.unpack(self.manifest, self._read, allow_code=spec.code)
            # Folds another number into the seeds than any worker has.
            other = self._number + MAX_WORKERS * number
            UntrainedState(model, self.manifest.untrained_rules, worker=other, others=self._sources)
            found.append(model)
        return found

    # ---- untrained state

    def untrained_of(self, number: int) -> UntrainedState:
        """Return the untrained state of the worker with this number; folds the number into the model's seeds."""
        optimizers = optimizer_state(self.model, self.manifest.local_optimizers)
        others = [*optimizers, *self._outside, *self._sources]
        return UntrainedState(self.model, self.manifest.untrained_rules, worker=number, others=others)

    @cached_property
    def of_optimizers(self) -> tuple[range, int]:
        """Variables of the untrained state that optimizers stepping here have, by index, and their bytes."""
        own = optimizer_state(self.model, self.manifest.local_optimizers)
        first = len(untrained_variables(self.model))
        return range(first, first + len(own)), sum(math.prod(v.shape) * 4 for v in own)

    def load_untrained(self, encoded: bytes) -> None:
        """Replace the untrained state, unless ``encoded`` is empty."""
        if encoded:
            self.untrained.load(encoded)

    # ---- data

    def begin_epoch(self, begin: ins.BeginEpoch) -> None:
        """Check the sample order, take the untrained state, and begin the epoch of metrics and data.

        Raises:
            ProtocolError: this machine draws another sample order than the server's.
        """
        if begin.order_crc and begin.order_crc != order_crc(self._order(0)):
            raise ProtocolError(
                f"{self._owner()}: this machine's NumPy {np.__version__} draws another sample order than the "
                "server's. Install the same NumPy version on both."
            )
        self.metrics.reset()
        self.load_untrained(begin.untrained)
        if self.train is not None:
            self.train.begin_epoch(begin.epoch, self.spec.fit.initial_epoch)
        if isinstance(self.train, GraphSource):
            self.train.begin_iteration(begin.iteration)

    def supply(self, waits: Callable[[], object]) -> ins.Supply | None:
        """Wait for a batch of a dataset that runs here; see :meth:`GraphSource.supply`. None for other data."""
        return self.train.supply(waits) if isinstance(self.train, GraphSource) else None

    def close(self) -> None:
        """End what reads in the background."""
        if isinstance(self.train, GraphSource):
            self.train.close()

    def end_epoch(self, collect: ins.CollectState) -> None:
        """End the epoch of the data, unless training only pauses."""
        if self.train is not None and collect.over:
            self.train.end_epoch()

    def prefetch(self, source: BatchSource | None, tasks: Sequence[Task]) -> None:
        """Prepare the batches of these tasks, in this order, and those of the next round."""
        if source is not None:
            ahead = [*tasks, *map(self._in_next_round, tasks[-1:])]
            source.prefetch(
                [self.chosen(source, task, task.start, task.stop) for task in ahead if task.start < task.stop]
            )

    def _in_next_round(self, task: Task) -> Task:
        """Return the part of the next round that this worker will probably get; without rows if there is none."""
        width = task.stop - task.start if task.round else 0
        start = task.start + task.parts * width
        return replace(task, start=start, stop=min(start + width, self.spec.train.planned or 0))

    def batches_of(self, task: Task) -> list[Task]:
        """Return a task for each batch of the script in a task that has rows for several steps."""
        rows = self._batch_rows
        if task.data or task.stop - task.start <= rows:
            return [task]
        starts = range(task.start, task.stop, rows)
        return [replace(task, start=start, stop=min(start + rows, task.stop)) for start in starts]

    def position_of(self, task: Task) -> int | None:
        """Return the number of steps before a batch if one machine trained alone; None if its rows have no numbers."""
        fit, planned = self.spec.fit, self.spec.train.planned
        if planned is None:
            return None
        return fit.updates + task.pass_index * -(-planned // self._batch_rows) + task.start // self._batch_rows

    @property
    def _batch_rows(self) -> int:
        """Rows of a batch of the script: samples, or 1 where a row is the index of a batch."""
        return self.spec.fit.batch_size if self.spec.train.sized else 1

    def batch(self, source: BatchSource | None, task: Task) -> Any:
        """Return the batch of a task: a pytree of arrays.

        Args:
            source: :attr:`train` or :attr:`validation`; not used by a task that carries its batch.
            task: The task.

        Raises:
            ProtocolError: the task names rows, but the job has no arrays.
        """
        if task.data:
            return data.decode_batch(task.data)
        return self.rows(source, task, task.start, task.stop)

    def rows(self, source: BatchSource | None, task: Task, start: int, stop: int) -> Any:
        """Return the rows ``[start, stop)`` of the pass of a task, as :meth:`batch` does."""
        if source is None:
            raise ProtocolError(f"{self._owner()}: task {task.task} names rows, but the job has no arrays.")
        return source.batch(self.chosen(source, task, start, stop))

    def chosen(self, source: BatchSource, task: Task, start: int, stop: int) -> RowSelection:
        """Return the rows of a source that are the rows ``[start, stop)`` of the pass of a task."""
        if source is self.validation or not self.spec.fit.shuffle:
            return slice(start, stop)
        return self._order(0 if self.spec.fit.block else task.pass_index)[start:stop]

    # ---- evaluation and logs

    @contextmanager
    def aside(self, ahead: bool) -> Iterator[None]:
        """Leave the state and metrics of the training as they are before a block; False: do nothing."""
        if not ahead:
            yield
            return
        with self.untrained.preserved(), self.metrics.preserved():
            yield

    def begin_validation(self, epoch: int) -> None:
        """Begin the validation after an epoch; a second call does nothing."""
        if self.validation is not None:
            self.validation.begin_epoch(epoch, epoch)

    def evaluate(
        self, batches: Iterable[tuple[Any, int]], step: Callable[[Any], object], advanced: Callable[[], object]
    ) -> bytes:
        """Evaluate batches and return the metric variables over them.

        Args:
            batches: Each batch with its number of samples; None for a batch without rows.
            step: Evaluates one batch and updates the metrics.
            advanced: Called after each batch.
        """
        self.metrics.reset()
        for batch, samples in batches:
            if batch is not None:
                step(batch)
                self.metrics.stepped(samples)
            advanced()
        return self.metrics.collect()

    def summarise(self, merged: ins.Summarise) -> ins.Summary:
        """Turn merged metric variables into logs, and call the callbacks of a detached job."""
        with self.aside(merged.ahead):
            return self._summary(merged)

    def _summary(self, merged: ins.Summarise) -> ins.Summary:
        summary = ins.Summary(**self.metrics.summary(merged.metrics, merged.validation_metrics, merged.logs))
        if not merged.callbacks:
            return summary
        validation = {f"val_{name}": value for name, value in (summary.val_logs or {}).items()}
        is_last = merged.epoch + 1 >= self.spec.fit.epochs
        end = EpochEnd(merged.epoch, merged.steps, is_last, {**summary.logs, **validation})
        decision, logs = self._epoch_callbacks.decide(merged.callbacks, end)
        return replace(summary, logs={k: v for k, v in logs.items() if k not in validation}, decision=decision)

    @cached_property
    def _epoch_callbacks(self) -> EpochCallbacks:
        """Callbacks of the job.

        Raises:
            PolicyRefused: they carry code, which the job does not declare.
        """
        callbacks = self.spec.callbacks
        if callbacks is None:
            raise ProtocolError(f"{self._owner()}: a state of callbacks came, but the job has none.")
        if callbacks.code and not self.spec.code:
            raise PolicyRefused("The job's callbacks carry code, but its specification says that it has none.")

        def load(artifact: str) -> Any:
            return load_objects(self.manifest, artifact, self._read, {})[SCHEDULE]

        return EpochCallbacks(callbacks, load, self.model.metrics)


def samples_of(task: Task) -> int:
    """Return the number of samples of a task; a task that carries its batch states it."""
    return task.stop - task.start or task.samples
