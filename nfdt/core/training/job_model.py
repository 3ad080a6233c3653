"""The model part of a worker of a job, for every kind of worker: model, untrained state, data, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ProtocolError
from nfdt.core.order import order_crc, sample_order
from nfdt.core.program import unpack
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.optimizer import inner_optimizer
from nfdt.core.specs.job import DataSpec, JobSpec
from nfdt.core.training import data, merge
from nfdt.core.training.metrics import ModelMetrics
from nfdt.core.training.untrained_state import UntrainedState
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task


class JobModel:
    """One job's model and data in one process.

    Args:
        spec: The job.
        manifest: Program of the job.
        read: Returns an artifact's bytes by its sha256.
        open_array: Returns an artifact that is a ``.npy`` file as an array.
        number: Number of the worker in the job; determines its random seeds.
        owner: Returns the name of the worker for error messages.

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
        read: Callable[[str], bytes],
        open_array: Callable[[str], Array],
        *,
        number: int = 0,
        owner: Callable[[], str] = lambda: "worker",
    ) -> None:
        self.manifest, self._owner = manifest, owner
        self.model = unpack.unpack(manifest, read, allow_code=spec.code)
        self.layout = manifest.layout
        self.first_update = int(inner_optimizer(self.model).iterations)
        self.untrained = self.untrained_of(number)
        self.metrics = ModelMetrics(self.model)
        self.train = _open_source(spec.train, open_array)
        self.validation = _open_source(spec.validation, open_array)
        self.use(spec)

    def use(self, spec: JobSpec) -> None:
        """Switch to another job with the same program and data."""
        self.spec = spec
        self._order = lru_cache(maxsize=2)(self._sample_order)

    # ---- untrained state

    def untrained_of(self, number: int) -> UntrainedState:
        """Return the untrained state of the worker with this number; folds the number into the model's seeds."""
        return UntrainedState(self.model, self.manifest.untrained_rules, worker=number)

    def take_untrained(self, encoded: bytes) -> None:
        """Replace the untrained state, unless ``encoded`` is empty."""
        if encoded:
            self.untrained.write(merge.decode_arrays(encoded))

    # ---- data

    def check_order(self, crc: int) -> None:
        """Compare the first sample order with the server's.

        Raises:
            ProtocolError: the orders differ.
        """
        if self.spec.train.samples and crc != order_crc(self._order(0)):
            raise ProtocolError(
                f"{self._owner()}: this machine's NumPy {np.__version__} draws another sample order than the "
                "server's. Install the same NumPy version on both."
            )

    def batch(self, source: data.ArraySource | None, task: Task) -> Any:
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

    def rows(self, source: data.ArraySource | None, task: Task, start: int, stop: int) -> Any:
        """Return the rows ``[start, stop)`` of the pass of a task, as :meth:`batch` does."""
        if source is None:
            raise ProtocolError(f"{self._owner()}: task {task.task} names rows, but the job has no arrays.")
        if source is self.validation or not self.spec.fit.shuffle:
            return source.batch(slice(start, stop))
        return source.batch(self._order(task.pass_index)[start:stop])

    def _sample_order(self, pass_index: int) -> Array:
        fit = self.spec.fit
        return sample_order(self.spec.train.samples or 0, fit.shuffle, fit.seed, pass_index)

    # ---- evaluation and logs

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
        """Turn merged metric variables into logs."""
        return ins.Summary(**self.metrics.summary(merged.metrics, merged.validation_metrics, merged.logs))


def samples_of(task: Task) -> int:
    """Return the number of samples of a task; a task that carries its batch states it."""
    return task.stop - task.start or task.samples


def _open_source(spec: DataSpec | None, open_array: Callable[[str], Array]) -> data.ArraySource | None:
    if spec is None or spec.kind != "arrays":
        return None
    return data.ArraySource(spec.structure, [open_array(name) for name in spec.arrays])
