"""Workers that take steps of the user's own optimizer between two pushes.

A worker goes on from its own weights while a push is on its way, as a real one does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.model.training.metric_states import merge_metric_states
from nfdt.simulate.events import ActivitySteps
from nfdt.simulate.worker import SimulatedWorker
from nfdt.transport.base import Pulled
from nfdt.worker.local_weights import LocalWeights


class OwnVector:
    """Weights of one worker, which its steps change."""

    def __init__(self) -> None:
        self.weights: Array = np.zeros(0, np.float32)

    def load(self, weights: Array) -> None:
        """Replace the weights."""
        self.weights = np.array(weights)

    def read(self) -> Array:
        """Return a copy of the weights."""
        return np.array(self.weights)


@dataclass
class LocalStepWorker(SimulatedWorker):
    """A worker whose tasks are several steps of the user's optimizer; the program's step makes them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vector = OwnVector()
        self._own = LocalWeights(self._vector)

    def execute(self, instruction: ins.Instruction) -> ins.Report:
        """Execute an instruction; an evaluation uses other weights, so that the next step begins with new ones."""
        if isinstance(instruction, ins.Evaluate):
            self.forget()
        return super().execute(instruction)

    def compute(self, task: Task, held: Pulled) -> ActivitySteps:
        """Make the steps of a task, one after the other."""
        self._own.follow(held)
        done, seconds, samples, counted = 0, 0.0, 0, list[bytes]()
        for part in self.trainer.batches_of(task):
            if done and self.pipeline.take_arrived():
                self._own.follow(self.pipeline.weights())
            step = yield from super().compute(part, Pulled(self._vector.weights, (self.trainer.position_of(part),)))
            if self._apart:
                counted.append(self._counted_apart)
            self._vector.weights = self._vector.weights - step.gradient
            self._own.stepped()
            done, seconds, samples = done + 1, seconds + step.seconds, samples + step.samples
        self._counted_apart = merge_metric_states(counted)  # empty unless the task counts apart
        planned = self.spec.train.planned is not None
        return replace(
            step, gradient=None, denominator=0.0, seconds=seconds, samples=samples, batches=done, due=planned
        )

    def forget(self) -> None:
        """Go on from the weights of the last reply."""
        self._own.forget()

    def difference(self, held: Array) -> Array:
        """Return what the steps since the last push have changed."""
        self._own.follow(self.pipeline.weights())
        return self._own.difference()
