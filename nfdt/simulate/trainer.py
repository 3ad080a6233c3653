"""The one Keras model that all simulated workers compute with, in turn: gradients, metrics, evaluation.

Metrics are merged over workers anyway, so they are counted together; untrained state (BatchNorm statistics,
seeds) is each worker's own and is put into the model when its worker computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.order import sample_order
from nfdt.core.program import unpack
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.optimizer import inner_optimizer
from nfdt.core.specs.job import DataSpec, JobSpec
from nfdt.core.training import data, evaluate, gradient_step, merge, untrained_state
from nfdt.core.training.metrics import ModelMetrics
from nfdt.schedulers import Task
from nfdt.transport.base import Pulled

Read = Callable[[str], bytes]


class Trainer:
    """What a worker's model does, for any number of workers.

    Args:
        spec: The job.
        manifest: The program.
        read: Returns an artifact's bytes by its sha256.

    Attributes:
        gradient_s: Real seconds that gradients took, with gathering their rows.
        evaluate_s: That evaluations took.
        gradients: How many there were.
    """

    def __init__(self, spec: JobSpec, manifest: Manifest, read: Read) -> None:
        self.gradient_s, self.evaluate_s, self.gradients = 0.0, 0.0, 0
        self._rules = manifest.untrained_rules
        self._model = unpack.unpack(manifest, read, allow_code=spec.code)
        self._first_update = int(inner_optimizer(self._model).iterations)
        self.layout = manifest.layout
        self._step = gradient_step.GradientStep(self._model, self.layout, loss_scale=manifest.loss_scale)
        self._evaluate = evaluate.EvaluateStep(self._model, self.layout)
        self._metrics = ModelMetrics(self._model)
        self._train = _source(spec.train, read)
        self._validation = _source(spec.validation, read)
        self._has_state = bool(self._model.non_trainable_variables)
        self._initial = self._read_state()
        self.begin(spec)

    def begin(self, spec: JobSpec) -> None:
        """Nothing of an earlier job is left; the data and the program are the same, all else of the job may differ."""
        self._spec = spec
        self._order = lru_cache(maxsize=2)(self._sample_order)
        self._states: dict[int, list[Array]] = {}
        self._untrained: dict[int, untrained_state.UntrainedState] = {}
        self._loaded: int | None = None
        self._epoch: int | None = None
        self._metrics.reset()

    def begin_epoch(self, worker: int, epoch: int, untrained: bytes) -> None:
        """A worker begins an epoch; the first that does resets the metrics. Empty ``untrained``: it keeps its own."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._metrics.reset()
        self._take(worker, untrained)

    def gradient(self, worker: int, held: Pulled, tasks: Sequence[Task]) -> tuple[Array, Mapping[str, Any]]:
        """The mean gradient over the rows of some tasks, and the running logs.

        Args:
            worker: Whose state the model shall have.
            held: The weights to compute on.
            tasks: One, or one for each member of a group; the mean of their gradients is weighted by their samples.

        Returns:
            Shape ``(P,)`` float32, and name -> 0-d tensor.
        """
        self._load(worker)
        began = time.perf_counter()
        batches = [self._batch(self._train, task) for task in tasks]
        results = [self._step(held.weights, b, version=self._first_update + held.versions[0]) for b in batches]
        gradients = [np.asarray(result.gradient) for result in results]
        self.gradient_s += time.perf_counter() - began
        self.gradients += len(results)
        for result, task in zip(results, tasks, strict=True):
            self._metrics.stepped(samples_of(task), result.logs)
        return _mean(gradients, [samples_of(task) for task in tasks]), results[-1].logs

    def collect(self, worker: int) -> tuple[bytes, bytes]:
        """A worker's untrained state and its metrics; those of all workers come with the first one's."""
        self._load(worker)
        metrics = self._metrics.collect()
        self._metrics.reset()
        return merge.encode_arrays(self._read_state()), metrics

    def evaluate(self, worker: int, weights: Any, untrained: bytes, tasks: Sequence[Task]) -> bytes:
        """The metrics over these rows of the validation data."""
        began = time.perf_counter()
        self._take(worker, untrained)
        self._load(worker)
        self._metrics.reset()
        for task in tasks:
            self._evaluate(weights, self._batch(self._validation, task))
            self._metrics.stepped(samples_of(task))
        metrics = self._metrics.collect()
        self.evaluate_s += time.perf_counter() - began
        return metrics

    def summary(self, metrics: bytes, validation: bytes, running: Mapping[str, float]) -> dict[str, Any]:
        """The logs of merged metrics, as :meth:`ModelMetrics.summary` says."""
        return self._metrics.summary(metrics, validation, running)

    # ---- the workers' untrained states

    def _take(self, worker: int, untrained: bytes) -> None:
        if untrained and self._has_state:
            self._load(worker)
            self._untrained[worker].write(merge.decode_arrays(untrained))

    def _load(self, worker: int) -> None:
        if not self._has_state or self._loaded == worker:
            return
        if self._loaded is not None:
            self._states[self._loaded] = self._read_state()
        self._loaded = worker
        self._write_state(self._states.get(worker, self._initial))
        if worker not in self._untrained:  # folds the worker's number into the seeds
            self._untrained[worker] = untrained_state.UntrainedState(self._model, self._rules, worker=worker)

    def _read_state(self) -> list[Array]:
        return [np.array(variable.numpy()) for variable in self._model.non_trainable_variables]

    def _write_state(self, arrays: Sequence[Array]) -> None:
        for variable, array in zip(self._model.non_trainable_variables, arrays, strict=True):
            variable.assign(array)

    # ---- data

    def _batch(self, source: data.ArraySource | None, task: Task) -> Any:
        if task.data:
            return data.decode_batch(task.data)
        assert source is not None, "the job has arrays"
        whole = source is self._validation or not self._spec.fit.shuffle
        rows = slice(task.start, task.stop) if whole else self._order(task.pass_index)[task.start : task.stop]
        return source.batch(rows)

    def _sample_order(self, pass_index: int) -> Array:
        fit = self._spec.fit
        return sample_order(self._spec.train.samples or 0, fit.shuffle, fit.seed, pass_index)


def samples_of(task: Task) -> int:
    """How many rows a task has; a fed batch says so itself."""
    return task.stop - task.start or task.samples


def _source(spec: DataSpec | None, read: Read) -> data.ArraySource | None:
    if spec is None or spec.kind != "arrays":
        return None
    return data.ArraySource(spec.structure, [data.decode_npy(read(name)) for name in spec.arrays])


def _mean(gradients: Sequence[Array], samples: Sequence[int]) -> Array:
    if len(gradients) == 1:
        return gradients[0]
    total = sum(samples)
    with np.errstate(invalid="ignore", over="ignore"):  # the shards drop what is not finite
        mean = sum(np.float32(count / total) * gradient for gradient, count in zip(gradients, samples, strict=True))
    return np.asarray(mean, np.float32)
