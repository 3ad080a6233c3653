"""Workers and groups that take steps of the user's own optimizer between two pushes.

A flat worker goes on from its own weights while a push is on its way, as a real one does. Each group, as ``DeltaOuter``
of Horovod's ranks, has weights and optimizer variables of its own; all groups use one engine of the shards in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.sharding import make_plan
from nfdt.core.work import instructions as ins
from nfdt.core.work.tasks import Task
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt.simulate.events import ActivitySteps
from nfdt.simulate.worker import SimulatedWorker
from nfdt.transport.base import Pulled
from nfdt.update_rules.plain import Plain
from nfdt.worker.local_weights import LocalWeights


class LocalOptimizer:
    """The user's optimizer in every group of a job; a new group starts with the variables of the job's start.

    Args:
        manifest: The program.
        state: State at the start of the job.

    Attributes:
        learning_rate: Learning rate of each group from its next epoch on; None: the group's own.
    """

    def __init__(self, manifest: Manifest, state: State) -> None:
        from nfdt.shard.keras_engine import KerasEngine  # imports TensorFlow, which takes seconds
        from nfdt.shard.optimizer import build_optimizer

        built = build_optimizer(manifest, make_plan(manifest, 0, 1), state.weights)
        built.load(state.optimizer)
        self._engine = KerasEngine(built, Plain())
        self._initial, self._first = self._engine.read(), self._engine.updates
        self._skips = manifest.loss_scale is not None
        self._states: dict[int, tuple[Array, dict[int, Array]]] = {}
        self._loaded: int | None = None
        self.learning_rate: float | None = None

    def begin_epoch(self, group: int) -> None:
        """Set the learning rate of this group.

        Raises:
            UsageError: the optimizer follows a schedule.
        """
        if self.learning_rate is not None:
            self._load(group)
            self._engine.set_learning_rate(self.learning_rate)

    def replace_weights(self, group: int, weights: Any) -> None:
        """Replace the weights of a group, flat, shape ``(P,)``, float32; the optimizer's variables stay."""
        self._load(group)
        self._engine.write(np.asarray(weights), {})

    def weights(self, group: int) -> Pulled:
        """Return a copy of the group's weights; their version is its number of updates."""
        self._load(group)
        weights, _ = self._engine.read(weights_only=True)
        return Pulled(weights, (self._engine.updates - self._first,))

    def step(self, group: int, gradient: Array) -> None:
        """Update a group by the mean gradient of its batch, shape ``(P,)``, float32.

        Only with a dynamic loss scale is a gradient left out that is not finite, as in Keras.
        """
        if self._skips and not np.isfinite(gradient).all():
            return
        self._load(group)
        self._engine.step(self._engine.tensor(gradient), None, 0, {}, length=0.0)

    def _load(self, group: int) -> None:
        if self._loaded == group:
            return
        if self._loaded is not None:
            self._states[self._loaded] = self._engine.read()
        self._engine.write(*self._states.get(group, self._initial))
        self._loaded = group


@dataclass
class LocalWorker(SimulatedWorker):
    """A group that pushes what the steps since the last push have changed, as the difference ``pulled - own``.

    Args:
        optimizer: The optimizer of all groups.
    """

    optimizer: LocalOptimizer = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps = 0  # since the last push

    def ask(self, report: ins.Report) -> ActivitySteps:
        """Wait for an instruction; the steps of a whole lease are taken, whatever time they need."""
        instruction = yield from super().ask(report)
        whole = isinstance(instruction, ins.Work)
        return replace(instruction, budget_s=0.0, look_ahead=False) if whole else instruction

    def execute(self, instruction: ins.Instruction) -> ins.Report:
        """Execute an instruction; with an epoch a new learning rate begins."""
        if isinstance(instruction, ins.BeginEpoch):
            self.optimizer.begin_epoch(self.index)
        return super().execute(instruction)

    def compute(self, task: Task, held: Pulled) -> ActivitySteps:
        """Compute a gradient on the group's own weights, and update these."""
        if not self._steps:
            self.optimizer.replace_weights(self.index, held.weights)
        step = yield from super().compute(task, self.optimizer.weights(self.index))
        self.optimizer.step(self.index, step.gradient)
        self._steps += 1
        return replace(step, gradient=None, denominator=0.0, due=self._steps >= self.post.local_steps)

    def difference(self, held: Array) -> Array:
        """Return what the steps since the last push have changed."""
        self._steps = 0
        return np.asarray(held) - self.optimizer.weights(self.index).weights


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
    """A flat worker whose tasks are several steps of the user's optimizer; the program's step makes them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vector = OwnVector()
        self._own = LocalWeights(self._vector)

    def execute(self, instruction: ins.Instruction) -> ins.Report:
        """Execute an instruction; an evaluation uses other weights, so that the next step begins with new ones."""
        if isinstance(instruction, ins.Evaluate):
            self._own.forget()
        return super().execute(instruction)

    def compute(self, task: Task, held: Pulled) -> ActivitySteps:
        """Make the steps of a task, one after the other."""
        self._own.follow(held)
        done, seconds, samples = 0, 0.0, 0
        for part in self.trainer.batches_of(task):
            for sent in self.pipeline.take_arrived() if done else ():
                self._loop.answered(sent)
                self._own.follow(self.pipeline.weights())
            step = yield from super().compute(part, Pulled(self._vector.weights, (self.trainer.position_of(part),)))
            self._vector.weights = self._vector.weights - step.gradient
            self._own.stepped()
            done, seconds, samples = done + 1, seconds + step.seconds, samples + step.samples
        planned = self.spec.train.planned is not None
        return replace(
            step, gradient=None, denominator=0.0, seconds=seconds, samples=samples, batches=done, due=planned
        )

    def difference(self, held: Array) -> Array:
        """Return what the steps since the last push have changed."""
        self._own.follow(self.pipeline.weights())
        return self._own.difference()
