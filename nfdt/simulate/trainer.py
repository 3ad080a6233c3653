"""The one Keras model that all simulated workers use in turn: gradients, metrics, evaluation.

Metrics are counted together, because they are merged over workers anyway. Untrained state (BatchNorm statistics,
seeds) is separate for each worker and is loaded into the model when its worker computes.

What a gradient is computed on is known when its step begins, and nothing needs its value before the step ends. Where
that is faster, gradients are therefore computed several at a time, when the first of them is needed.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.model.backends.contract import current
from nfdt.model.backends.lanes import GradientLane
from nfdt.model.program.manifest import Manifest
from nfdt.model.training import data, merge, steps
from nfdt.model.training.job_model import JobModel, samples_of
from nfdt.model.training.untrained_state import UntrainedState
from nfdt.shard.building import KeptEngine
from nfdt.simulate.pending import PendingGradients, shares_of
from nfdt.transport.base import Pulled

Read = Callable[[str], bytes | memoryview]


class StepGradient(NamedTuple):
    """Result of a worker's step.

    Attributes:
        gradient: Shape ``(P,)`` float32.
        logs: Running logs, name -> 0-d tensor.
        denominator: Denominator of the loss; 0: the number of samples, infinity: the loss is a sum.
    """

    gradient: Array
    logs: Mapping[str, Any]
    denominator: float


class Trainer:
    """The model shared by any number of workers.

    Args:
        spec: The job.
        manifest: The program.
        read: Returns an artifact's bytes by its sha256.
        lanes: Most gradients that are computed in one call, if the model allows more than one; None: as many as are
            best on this machine.

    Attributes:
        gradient_s: Real seconds of all gradients, including gathering their rows.
        evaluate_s: Real seconds of all evaluations.
        gradients: Number of gradients.
        engines: Engine of each shard of the last job, by the shard's index: what it compiled is never freed.
    """

    def __init__(self, spec: JobSpec, manifest: Manifest, read: Read, *, lanes: int | None = None) -> None:
        self.gradient_s, self.evaluate_s, self.gradients = 0.0, 0.0, 0
        self.engines: defaultdict[int, KeptEngine] = defaultdict(KeptEngine)
        self._job = JobModel(spec, manifest, read, lambda name: data.decode_npy(read(name)))
        self.layout = self._job.layout
        self._step = steps.make_step(self._job.model, manifest, rate=spec.algorithm.local_rate)
        lanes = current().lanes if lanes is None else lanes
        batched = steps.batched_step(self._step) if lanes > 1 else None
        self._pending = PendingGradients(batched, self._job, lanes) if batched is not None else None
        self._evaluate = steps.evaluation_step(self._job.model, self.layout)
        self._metrics = self._job.metrics
        self._variables = self._job.untrained.variables
        self._initial = self._read_state()
        self.begin(spec)

    def begin(self, spec: JobSpec) -> None:
        """Reset the state of an earlier job; the new job has the same data, program and ``local_rate``."""
        self._job.use(spec)
        if self._pending is not None:
            self._pending.clear()
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

    def begin_gradient(self, worker: int, held: Pulled, tasks: Sequence[Task]) -> Callable[[], StepGradient]:
        """Begin the step of a worker, whose inputs are known; the result is computed if it is needed, or before.

        Args:
            worker: Number of the worker.
            held: Weights to compute on; unchanged until the step ends.
            tasks: One task, or one per member of a group, whose gradients are combined by their denominators.

        Returns:
            A function that ends the step, to call once: it counts the metrics and returns the gradient of the rows of
            the tasks.
        """
        one_by_one = partial(self._gradient, worker, held, tasks)
        lane = None if self._pending is None else self._pending.add(held, self._state_of(worker), tasks)
        if self._pending is None or lane is None:
            return one_by_one
        return partial(self._ended, self._pending, worker, lane, tasks, one_by_one)

    def _gradient(self, worker: int, held: Pulled, tasks: Sequence[Task]) -> StepGradient:
        """Compute the gradients of a step one by one, with the worker's state in the model."""
        self._load(worker)
        began = time.perf_counter()
        batches = [self._job.batch(self._job.train, task) for task in tasks]
        version = self._job.first_update + held.versions[0]
        results = [
            self._step(held.weights, batch, version=version, share=share)
            for batch, share in zip(batches, shares_of(tasks), strict=True)
        ]
        gradients = [result.vector for result in results]
        self.gradient_s += time.perf_counter() - began
        self.gradients += len(results)
        for result, task in zip(results, tasks, strict=True):
            self._metrics.stepped(samples_of(task), result.logs)
        return _union(gradients, tasks, [result.denominator for result in results], results[-1].logs)

    def _ended(
        self,
        pending: PendingGradients,
        worker: int,
        lane: GradientLane,
        tasks: Sequence[Task],
        one_by_one: Callable[[], StepGradient],
    ) -> StepGradient:
        """End a step that may have been computed together with others."""
        began = time.perf_counter()
        results = pending.results(lane)
        self.gradient_s += time.perf_counter() - began
        if results is None:
            return one_by_one()
        self.gradients += len(results)
        self._keep(worker, lane.state)
        logs: Mapping[str, Any] = {}
        for result, task in zip(results, tasks, strict=True):
            logs = pending.count(result)
            self._metrics.stepped(samples_of(task), logs)
        gradients = [result.gradient for result in results]
        return _union(gradients, tasks, [result.denominator for result in results], logs)

    def batches_of(self, task: Task) -> list[Task]:
        """Return a task for each batch of the script in a task."""
        return self._job.batches_of(task)

    def position_of(self, task: Task) -> int:
        """Return the number of the job's steps before a batch; see :meth:`JobModel.position_of`."""
        return (self._job.position_of(task) or 0) - self._job.first_update

    def apart(self, ended: Callable[[], StepGradient]) -> tuple[StepGradient, bytes]:
        """End a step whose metrics count apart; return its result and these metrics."""
        held = self._metrics.set_aside()
        result, counted = ended(), self._metrics.collect()
        self._metrics.take_back(held)
        return result, counted

    def collect(self, worker: int) -> tuple[bytes, bytes]:
        """Return a worker's untrained state and metrics; the first worker's metrics include those of all workers."""
        self._load(worker)
        if metrics := self._metrics.collect():  # otherwise nothing was counted since the last reset
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
            self._untrained[worker].load(untrained)

    def _load(self, worker: int) -> None:
        if not self._variables or self._loaded == worker:
            return
        if self._loaded is not None:
            self._states[self._loaded] = self._read_state()
        self._loaded = worker
        self._write_state(self._states.get(worker, self._initial))
        if worker not in self._untrained:  # folds the worker's number into the seeds
            self._untrained[worker] = self._job.untrained_of(worker)

    def _state_of(self, worker: int) -> list[Array]:
        """Return the state of a worker, which need not be loaded."""
        if worker not in self._states or self._loaded == worker:
            self._load(worker)
            return self._read_state()
        return self._states[worker]

    def _keep(self, worker: int, state: list[Array]) -> None:
        """Replace the state of a worker."""
        self._states[worker] = state
        if self._loaded == worker:
            self._loaded = None

    def _read_state(self) -> list[Array]:
        return [np.array(variable.numpy()) for variable in self._variables]

    def _write_state(self, arrays: Sequence[Array]) -> None:
        for variable, array in zip(self._variables, arrays, strict=True):
            variable.assign(array)


def _union(
    gradients: Sequence[Array], tasks: Sequence[Task], denominators: Sequence[Any], logs: Mapping[str, Any]
) -> StepGradient:
    """Return the gradient of the union of tasks with these gradients, and its denominator."""
    known = [0.0 if each is None else float(each) for each in denominators]
    if len(gradients) == 1:
        return StepGradient(gradients[0], logs, known[0])
    denominator = sum(known)
    weights = [each or samples_of(task) for each, task in zip(known, tasks, strict=True)]
    factors = [1.0 if math.isinf(denominator) else weight / sum(weights) for weight in weights]
    with np.errstate(invalid="ignore", over="ignore"):  # the shards drop gradients that are not finite
        union = sum(np.float32(factor) * gradient for factor, gradient in zip(factors, gradients, strict=True))
    return StepGradient(np.asarray(union, np.float32), logs, denominator)
