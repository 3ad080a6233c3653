"""One shard's weights, optimizer and rule state, and the compiled functions that move them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from nfdt.codecs.blocks import is_finite
from nfdt.core.arrays import ParameterLayout
from nfdt.core.errors import UsageError
from nfdt.shard.optimizer import BuiltOptimizer
from nfdt.shard.step import FusedStep
from nfdt.shard.tensors import Half, TensorOps, Vector, as_array, as_tensor, read, whole
from nfdt.update_rules.base import State, UpdateRule


@dataclass(frozen=True)
class Sent:
    """Weights for a worker, and the same as a difference to an anchor where one was given."""

    weights: Vector
    half: Half | None = None

    @property
    def compact(self) -> Vector | Half:
        """The smaller form."""
        return self.half or self.weights


@dataclass(frozen=True)
class Stepped:
    """What a step gave: what to send, and the worker's new state."""

    sent: Sent
    worker: State


@dataclass
class Pending:
    """Gradients that wait to be applied together: their sample-weighted sum and what it is made of."""

    total: Vector
    samples: float = 0.0
    staleness: float = 0.0
    count: int = 0

    def note(self, samples: int, staleness: int) -> None:
        """One more gradient is in the sum."""
        self.samples += samples
        self.staleness += staleness
        self.count += 1


@functools.lru_cache(maxsize=1024)
def _scalar(value: float) -> Any:
    """A constant; most are small numbers that come again and again, and making one takes as long as a small step."""
    return tf.constant(value, tf.float32)


def _state(state: Mapping[str, Any]) -> State:
    return {name: tf.convert_to_tensor(value, tf.float32) for name, value in state.items()}


def _given(vector: Any) -> Any:
    """A nest with or without a vector."""
    return () if vector is None else (vector,)


@dataclass
class Engine:
    """Weights, optimizer and rule state of one shard. Not thread-safe: the store holds the lock.

    Args:
        built: The user's optimizer on this shard's variables.
        rule: The update rule.
    """

    built: BuiltOptimizer
    rule: UpdateRule
    _shard: State = field(init=False)

    def __post_init__(self) -> None:
        self._ops = TensorOps()
        self._fused = FusedStep(self.built, self.rule)
        self._take_over()

    @property
    def layout(self) -> ParameterLayout:
        """The shard's variables."""
        return self.built.plan.layout

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.layout.size

    @property
    def updates(self) -> int:
        """Updates the optimizer has seen."""
        return int(self._fused.updates())

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return float(self.built.optimizer.learning_rate)

    def weights(self) -> Vector:
        """The weights as they are; later steps leave them so, as TensorFlow copies a variable that is held on write."""
        if not self.size:
            return tf.zeros(0)
        return read(self.built.variables[0]) if self.built.plan.flat else self._fused.flat()

    @staticmethod
    def tensor(vector: npt.NDArray[np.float32]) -> Vector:
        """A gradient from the network; see :func:`as_tensor`."""
        return as_tensor(vector)

    @staticmethod
    def array(vector: Vector | Half) -> npt.NDArray[np.float32]:
        """A read-only view of a reply, or what a half stands for."""
        return as_array(whole(vector))

    def no_difference(self) -> Any:
        """The difference of an anchor to itself."""
        return tf.zeros(self.size, tf.bfloat16)

    def new_worker(self) -> State:
        """The rule's state for a worker that has not pushed yet."""
        return _state(self.rule.init_worker(self._ops, self._fused.flat()))

    def new_pending(self) -> Pending:
        """Nothing is waiting."""
        return Pending(tf.zeros(self.size, tf.float32))

    def step(
        self, gradient: Vector, backup: Any, staleness: int, worker: State, *, rate: float = 1.0, anchor: Any = None
    ) -> Stepped:
        """Apply one finite gradient.

        Args:
            gradient: Shape ``(size,)`` float32.
            backup: What it was computed on, a vector or a half; None for a rule that does not ask.
            staleness: Updates it missed.
            worker: The rule's state for its worker.
            rate: Multiplies the learning rate.
            anchor: What the reply shall be a difference to; None or a vector at every call.
        """
        args = (gradient, _given(backup), _scalar(staleness), _scalar(rate), self._shard, worker, _given(anchor))
        answer, self._shard, worker = self._fused.step(*args)
        return Stepped(self._sent(answer, anchor), worker)

    def hold(
        self, pending: Pending, gradient: Vector, backup: Any, staleness: int, worker: State, samples: int
    ) -> State:
        """Correct one finite gradient and add it to ``pending``; returns the worker's new state."""
        args = (pending.total, _scalar(samples), gradient, _given(backup), _scalar(staleness), self._shard, worker)
        pending.total, self._shard, worker = self._fused.correct(*args)
        pending.note(samples, staleness)
        return worker

    def add(self, pending: Pending, gradient: Vector, samples: int) -> None:
        """Add one raw gradient of a round, which must be finite, to ``pending``."""
        pending.total = self._fused.add(pending.total, _scalar(samples), gradient)
        pending.note(samples, 0)

    def step_round(self, pending: Pending, worker: State) -> State | None:
        """Apply the mean gradient of a round, computed on the weights as they are; None if it is not finite.

        Returns the rule's new state for all workers.
        """
        mean = pending.total / _scalar(pending.samples)
        if not is_finite(as_array(mean)):
            return None
        now = self.weights() if self.rule.uses_backup else None
        args = (mean, _given(now), _scalar(0.0), _scalar(1.0), self._shard, worker, ())
        _, self._shard, worker = self._fused.step_round(*args)
        return worker

    def step_held(self, pending: Pending, worker: State) -> None:
        """Apply the mean of corrected gradients, at the rate of their mean staleness."""
        staleness = _scalar(pending.staleness / max(pending.count, 1))
        args = (pending.total, _scalar(pending.samples), staleness, self._shard, worker)
        self._shard = self._fused.step_held(*args)

    def reply(self, staleness: int, *, anchor: Any = None) -> Sent:
        """What a worker with this staleness receives when its push changed nothing; ``anchor`` as in :meth:`step`."""
        if anchor is None and not self.rule.looks_ahead:
            return Sent(self.weights())
        return self._sent(self._fused.reply(_scalar(staleness), self._shard, _given(anchor)), anchor)

    def _sent(self, answer: Any, anchor: Any) -> Sent:
        if anchor is not None:
            return Sent(answer[0], Half(anchor, answer[1]))
        return Sent(answer[0] if answer else self.weights())

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate.

        Raises:
            UsageError: the optimizer follows a schedule or a function, which Keras does not let replace either.
        """
        optimizer = self.built.optimizer
        if not isinstance(optimizer._learning_rate, keras.Variable):
            raise UsageError(
                f"Learning rate: expected a plain number in the optimizer to replace by {value}. Received: a schedule."
            )
        optimizer.learning_rate = value

    def read(self, *, weights_only: bool = False) -> tuple[npt.NDArray[np.float32], dict[int, npt.NDArray[Any]]]:
        """Copies of the weights and of the shard's part of the optimizer's variables, by index."""
        weights = np.array(as_array(self.weights()))
        if weights_only:
            return weights, {}
        self._give_back()
        return weights, self.built.read()

    def write(self, weights: npt.NDArray[np.float32], optimizer: Mapping[int, npt.NDArray[Any]]) -> None:
        """Replace the weights; where optimizer variables are given, those too, and the rule starts anew from them."""
        self._fused.assign(self.built.variables, tf.constant(weights, tf.float32))
        if optimizer:
            self._give_back()
            self.built.load(optimizer)
            self._take_over()

    def _give_back(self) -> None:
        """Fill the optimizer's own slots from the state of a rule that owns them."""
        owned = self._fused.owned_slots()
        left = self.rule.leave(self._ops, self._shard) if owned else {}
        for name, variables in owned.items():
            self._fused.assign(variables, left[name])

    def _take_over(self) -> None:
        self._shard = _state(self.rule.init_shard(self._ops, self._fused.flat()))
        if self.rule.owns_optimizer:
            slots = {
                name: self._fused.joined([v.value for v in held]) for name, held in self._fused.owned_slots().items()
            }
            self._shard = _state(self.rule.enter(self._ops, slots, self._fused.updates(), self._shard))
