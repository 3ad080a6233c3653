"""The one Keras model that all simulated workers use in turn: gradients, metrics, evaluation.

Metrics are counted together, because they are merged over workers anyway. Untrained state (BatchNorm statistics,
seeds) is separate for each worker and is loaded into the model when its worker computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.program.local_optimizers import state_variables
from nfdt.core.program.manifest import Manifest
from nfdt.core.specs.job import JobSpec
from nfdt.core.training import data, merge, steps
from nfdt.core.training.job_model import JobModel, samples_of
from nfdt.core.training.untrained_state import UntrainedState
from nfdt.core.work import instructions as ins
from nfdt.schedulers import Task
from nfdt.transport.base import Pulled

Read = Callable[[str], bytes]


class Trainer:
    """The model shared by any number of workers.

    Args:
        spec: The job.
        manifest: The program.
        read: Returns an artifact's bytes by its sha256.

    Attributes:
        gradient_s: Real seconds of all gradients, including gathering their rows.
        evaluate_s: Real seconds of all evaluations.
        gradients: Number of gradients.
    """

    def __init__(self, spec: JobSpec, manifest: Manifest, read: Read) -> None:
        self.gradient_s, self.evaluate_s, self.gradients = 0.0, 0.0, 0
        self._job = JobModel(spec, manifest, read, lambda name: data.decode_npy(read(name)))
        self.layout = self._job.layout
        self._step = steps.make_step(self._job.model, manifest)
        self._evaluate = steps.evaluation_step(self._job.model, self.layout)
        self._metrics = self._job.metrics
        self._variables = state_variables(self._job.model, manifest)
        self._initial = self._read_state()
        self.begin(spec)

    def begin(self, spec: JobSpec) -> None:
        """Reset the state of an earlier job; the new job has the same data and program, but may differ otherwise."""
        self._job.use(spec)
        self._states: dict[int, list[Array]] = {}
        self._untrained: dict[int, UntrainedState] = {}
        self._loaded: int | None = None
        self._epoch: int | None = None
        self._metrics.reset()

    def begin_epoch(self, worker: int, epoch: int, untrained: bytes) -> None:
        """Begin an epoch of a worker; the first worker resets the metrics. Empty ``untrained`` keeps its own state."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._metrics.reset()
        self._take(worker, untrained)

    def gradient(self, worker: int, held: Pulled, tasks: Sequence[Task]) -> tuple[Array, Mapping[str, Any]]:
        """Return the mean gradient over the rows of some tasks, and the running logs.

        Args:
            worker: Number of the worker whose state is loaded into the model.
            held: Weights to compute on.
            tasks: One task, or one per member of a group; the mean of their gradients is weighted by samples.

        Returns:
            The gradient, shape ``(P,)`` float32, and the logs, name -> 0-d tensor.
        """
        self._load(worker)
        began = time.perf_counter()
        batches = [self._job.batch(self._job.train, task) for task in tasks]
        results = [self._step(held.weights, b, version=self._job.first_update + held.versions[0]) for b in batches]
        gradients = [np.asarray(result.gradient) for result in results]
        self.gradient_s += time.perf_counter() - began
        self.gradients += len(results)
        for result, task in zip(results, tasks, strict=True):
            self._metrics.stepped(samples_of(task), result.logs)
        return _mean(gradients, [samples_of(task) for task in tasks]), results[-1].logs

    def collect(self, worker: int) -> tuple[bytes, bytes]:
        """Return a worker's untrained state and metrics; the first worker's metrics include those of all workers."""
        self._load(worker)
        metrics = self._metrics.collect()
        self._metrics.reset()
        return merge.encode_arrays(self._read_state()), metrics

    def evaluate(self, worker: int, weights: Any, untrained: bytes, tasks: Sequence[Task]) -> bytes:
        """Return the metrics over these tasks' rows of the validation data."""
        began = time.perf_counter()
        self._take(worker, untrained)
        self._load(worker)
        batches = ((self._job.batch(self._job.validation, task), samples_of(task)) for task in tasks)
        metrics = self._job.evaluate(batches, lambda batch: self._evaluate(weights, batch), lambda: None)
        self.evaluate_s += time.perf_counter() - began
        return metrics

    def summarise(self, merged: ins.Summarise) -> ins.Summary:
        """Turn merged metric variables into logs."""
        return self._job.summarise(merged)

    # ---- the workers' untrained states

    def _take(self, worker: int, untrained: bytes) -> None:
        if untrained and self._variables:
            self._load(worker)
            self._untrained[worker].take(untrained)

    def _load(self, worker: int) -> None:
        if not self._variables or self._loaded == worker:
            return
        if self._loaded is not None:
            self._states[self._loaded] = self._read_state()
        self._loaded = worker
        self._write_state(self._states.get(worker, self._initial))
        if worker not in self._untrained:  # folds the worker's number into the seeds
            self._untrained[worker] = self._job.untrained_of(worker)

    def _read_state(self) -> list[Array]:
        return [np.array(variable.numpy()) for variable in self._variables]

    def _write_state(self, arrays: Sequence[Array]) -> None:
        for variable, array in zip(self._variables, arrays, strict=True):
            variable.assign(array)


def _mean(gradients: Sequence[Array], samples: Sequence[int]) -> Array:
    if len(gradients) == 1:
        return gradients[0]
    total = sum(samples)
    with np.errstate(invalid="ignore", over="ignore"):  # the shards drop gradients that are not finite
        mean = sum(np.float32(count / total) * gradient for gradient, count in zip(gradients, samples, strict=True))
    return np.asarray(mean, np.float32)
