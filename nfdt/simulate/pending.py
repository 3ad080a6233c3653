"""Gradients whose workers are still computing in virtual time; in real time several are computed in one call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.work.tasks import Task
from nfdt.model.backends.lanes import BatchedStep, GradientLane, LaneBatch, LaneResult
from nfdt.model.training.data import ArraySource
from nfdt.model.training.job_model import JobModel, samples_of
from nfdt.transport.base import Pulled

_log = logging.getLogger(__name__)


class PendingGradients:
    """Gradients that are not needed yet.

    The first one that is needed brings all others whose batches have the same signature, so that a call is as wide as
    possible. Widths are powers of four, and the greatest one, because each is compiled: a narrower call repeats a lane.
    Gradients of a lost worker are computed like the others, and not used.

    Args:
        step: The step of several gradients.
        job: Model and data.
        most: Greatest width of a call.
    """

    def __init__(self, step: BatchedStep, job: JobModel, most: int) -> None:
        self._step, self._job, self._most = step, job, most
        self._lanes: list[GradientLane] = []
        self._failed = False
        source = job.train
        self._on_device = isinstance(source, ArraySource) and step.hold(source.batch(slice(0, source.samples)))

    def clear(self) -> None:
        """Drop all gradients, which no worker needs any more."""
        self._lanes.clear()

    def add(self, held: Pulled, state: list[Array], tasks: Sequence[Task]) -> GradientLane | None:
        """Add the gradients of a step, one per task; return None where they must be computed one by one.

        Args:
            held: Weights to compute on; unchanged until the step ends.
            state: Untrained variables before the step.
            tasks: The tasks.
        """
        batches = [] if self._failed else [b for b in map(self._batch, tasks) if b is not None]
        if len(batches) < len(tasks):
            return None
        version = self._job.first_update + held.versions[0]
        lane = GradientLane(np.asarray(held.weights), version, state, batches, shares_of(tasks))
        self._lanes.append(lane)
        return lane

    def results(self, lane: GradientLane) -> list[LaneResult] | None:
        """Return the results of a step, one per task; None if they must be computed one by one after all."""
        try:
            while lane.batches and not self._failed:
                self._advance(lane)
        except Exception as error:  # of the user's code, which fails again one by one, or no vectorised form, or memory
            self._failed = True
            self._lanes.clear()
            _log.warning("Gradients are computed one by one, as several at a time failed: %s", error)
        return None if lane.batches else lane.results

    def count(self, result: LaneResult) -> Mapping[str, Any]:
        """Count a result in the model's metrics; return the running logs."""
        return self._step.count(result.counted)

    def _batch(self, task: Task) -> LaneBatch | None:
        """Return the batch of a task; None for data that reading may change, which is read when the step ends."""
        source = self._job.train
        if not task.data and not isinstance(source, ArraySource):
            return None
        if source is None or task.data or not self._on_device:
            return self._step.batch(self._job.batch(source, task))
        return self._step.rows(self._job.chosen(source, task, task.start, task.stop))

    def _advance(self, wanted: GradientLane) -> None:
        """Compute the next gradient of a step, and of others like it."""
        signature = wanted.batches[0].signature
        alike = [lane for lane in self._lanes if lane is not wanted and lane.batches[0].signature == signature]
        lanes = [wanted, *alike][: self._most]
        repeated = [wanted] * (_width(len(lanes), self._most) - len(lanes))
        results = self._step([*lanes, *repeated])
        for lane, result in zip(lanes, results, strict=False):  # without the repeated ones
            lane.add_result(result)
        self._lanes = [lane for lane in self._lanes if lane.batches]


def _width(lanes: int, most: int) -> int:
    width = 1
    while width < lanes:
        width *= 4
    return min(width, most)


def shares_of(tasks: Sequence[Task]) -> list[float]:
    """Return the fraction of each task in their round, or in all of them: one, or one per member of a group."""
    total = sum(map(samples_of, tasks))
    return [task.share_of(total) * (samples_of(task) / total if total else 1.0) for task in tasks]
