"""The compiled step of a shard on the backend of Keras: clip, correct, move, reply, fused by XLA into one function.

All gradients are finite.

Keras keeps the order of its own ``apply``: clip the raw gradient, weight decay with fresh weights, the optimizer's
step, moving average, constraints, ``iterations + 1``. An update rule takes part in two places: it corrects the clipped
gradient, and, if it owns the optimizer, its ``advance`` replaces the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from nfdt.model.keras_internals import training as keras_training
from nfdt.shard.engine import Vector
from nfdt.shard.optimizer import BuiltOptimizer, replaced
from nfdt.update_rules.base import ArrayOps, Push, RuleState, UpdateRule


class EngineOps(ArrayOps, Protocol):
    """Functions on the arrays of TensorFlow, or of JAX in the simulator, in addition to those that rules may call."""

    def scalar(self, value: float) -> Any:
        """Return a 0-d float32 array."""

    def number(self, value: Any) -> Any:
        """Return a 0-d array, a variable's value or a Python number as float32."""

    def given(self, value: Any) -> Any:
        """Return an array as one of the backend."""

    def zeros(self, size: int) -> Vector:
        """Return a vector of zeros."""

    def copy(self, vector: Vector) -> Vector:
        """Return a vector that shares no memory with a variable."""

    def vector(self, array: npt.NDArray[Any]) -> Vector:
        """Return an array from outside as a vector, without a copy where that is safe."""

    def array(self, vector: Vector) -> npt.NDArray[Any]:
        """Return a read-only view of a vector."""

    def read(self, variable: Any) -> Vector:
        """Return a variable's value, which later assignments do not change."""

    def compress(self, vector: Vector, anchor: Vector) -> tuple[Vector, Any]:
        """Return the nearest vector that a bfloat16 difference to an anchor represents, and that difference."""

    def decompress(self, vector: Any) -> Vector:
        """Return a vector or a decompressed :class:`~nfdt.shard.engine.AnchoredBf16`."""

    def no_difference(self, size: int) -> Any:
        """Return a bfloat16 difference of zeros."""

    def are_finite(self, values: Sequence[Any]) -> bool:
        """Return whether all elements of all floating-point arrays are finite."""

    def compiled(self, function: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
        """Return a function compiled by XLA that may read and assign these Keras variables."""


class FusedStep:
    """Functions that run under XLA; they update the Keras variables and pass the rule's state through.

    ``backup`` and ``anchor`` are tuples with one element or none: a rule that does not use the backup may get none.
    Without an anchor a reply is not compressed.

    Args:
        built: The user's optimizer on this shard's variables.
        rule: The update rule.
        ops: Functions of the backend.
    """

    def __init__(self, built: BuiltOptimizer, rule: UpdateRule, ops: EngineOps) -> None:
        self._built = built
        self._rule = rule
        self._ops = ops
        self._optimizer = built.optimizer
        self._variables = built.variables
        variables = [*built.variables, *built.optimizer.variables]
        self.step = ops.compiled(self._step, variables)
        self.apply_round = ops.compiled(self._step, variables)
        self.apply = ops.compiled(self._apply, variables)
        self.accumulate = ops.compiled(self._accumulate, variables)
        self.reply = ops.compiled(self._reply, variables)
        self.accumulate_part = ops.compiled(self._accumulate_part, variables)

    def owned_slots(self) -> dict[str, list[Any]]:
        """Return the optimizer's variables that the rule keeps in its own state, by the rule's names."""
        return self._built.slots() if self._rule.owns_optimizer else {}

    def joined(self, parts: list[Any]) -> Vector:
        """Return arrays as one vector."""
        flat = [self._ops.reshape(self._ops.given(part), (-1,)) for part in parts]
        if not flat:
            return self._ops.zeros(0)
        return flat[0] if len(flat) == 1 else self._ops.concatenate(flat)

    def _split(self, vector: Vector) -> list[Any]:
        if self._built.plan.flat:
            return [vector]
        return [self._ops.reshape(vector[s.start : s.stop], s.shape) for s in self._built.plan.layout.slots]

    def assign(self, variables: list[Any], vector: Vector) -> None:
        """Assign the parts of ``vector`` to the variables, in their shapes."""
        for variable, part in zip(variables, self._split(vector), strict=True):
            variable.assign(part)

    def flat(self) -> Vector:
        """Return the weights; may share memory with the variables."""
        return self.joined([v.value for v in self._variables])

    def updates(self) -> Any:
        """Return the number of updates that the optimizer has applied, 0-d float32."""
        return self._ops.number(keras_training.own_iterations(self._optimizer).value)

    def _rate(self) -> Any:
        return self._ops.number(self._optimizer.learning_rate)

    def _decay(self) -> Any:
        """Return the decoupled weight decay at a learning rate of 1; None without any."""
        optimizer = self._optimizer
        if not optimizer.weight_decay:
            return None
        rates = [optimizer.weight_decay * keras_training.uses_weight_decay(optimizer, v) for v in self._variables]
        return self.joined([rate * variable.value for rate, variable in zip(rates, self._variables, strict=True)])

    def _clip(self, gradient: Vector) -> Vector:
        if self._optimizer.gradient_accumulation_steps:  # Keras clips the accumulated gradient
            return gradient
        return self.joined(keras_training.clipped(self._optimizer, self._split(gradient)))

    def _push(self, gradient: Vector, backup: Any, staleness: Any) -> Push:
        base = self._ops.decompress(backup[0]) if backup else gradient
        return Push(self._clip(gradient), self.flat(), base, staleness, self.updates())

    def _step(
        self,
        gradient: Vector,
        backup: Any,
        staleness: Any,
        factor: Any,
        shard: RuleState,
        worker: RuleState,
        anchor: Any,
    ) -> Any:
        rate = self._rate()
        made = self._rule.correct(self._ops, self._push(gradient, backup, staleness), shard, worker)
        moved = self._move(made.gradient, made.learning_rate_scale * factor, made.shard)
        return self._answer(rate, staleness, moved, anchor), moved, made.worker

    def _apply(self, total: Vector, weight: Any, denominator: Any, shard: RuleState) -> RuleState:
        return self._move(total / weight, weight / denominator, shard)

    def _accumulate(
        self,
        total: Vector,
        weight: Any,
        denominator: Any,
        gradient: Vector,
        backup: Any,
        staleness: Any,
        shard: RuleState,
        worker: RuleState,
    ) -> Any:
        """Add a gradient, weighted by its denominator and its own learning-rate factor, and add that weight."""
        made = self._rule.correct(self._ops, self._push(gradient, backup, staleness), shard, worker)
        own = denominator * made.learning_rate_scale
        return total + own * made.gradient, weight + own, made.shard, made.worker

    @staticmethod
    def _accumulate_part(total: Vector, weight: Any, gradient: Vector) -> Vector:
        return total + weight * gradient

    def _reply(self, staleness: Any, shard: RuleState, anchor: Any) -> Any:
        return self._answer(self._rate(), staleness, shard, anchor)

    def _answer(self, rate: Any, staleness: Any, shard: RuleState, anchor: Any) -> Any:
        """Return the reply and its difference to an anchor; nothing if the reply equals the current weights."""
        if not anchor and not self._rule.looks_ahead:
            return ()
        reply = self._rule.reply(self._ops, self.flat(), rate, staleness, shard, self._decay())
        return self._ops.compress(reply, anchor[0]) if anchor else (self._ops.copy(reply),)

    def _move(self, gradient: Vector, scale: Any, shard: RuleState) -> RuleState:
        """Update the variables by one Keras ``apply``; return the rule's new state."""
        optimizer, before, moved = self._optimizer, self.flat(), shard
        rate_of = keras_training.learning_rate_method(optimizer)

        def advance(gradients: list[Any], variables: list[Any], learning_rate: Any) -> None:
            nonlocal moved
            rate = self._ops.number(learning_rate)
            args = (self.joined(gradients), self.flat(), rate, self.updates(), shard, self._decay())
            result = self._rule.advance(self._ops, *args)
            moved = result.shard
            self.assign(self._variables, result.weights)

        def decay(variables: list[Any]) -> None:
            taken = self._rule.lessened(self._ops, self._decay(), shard)
            self.assign(self._variables, self.flat() - self._rate() * taken)

        methods: dict[str, Any] = {keras_training.RATE_METHOD: lambda: self._ops.number(rate_of()) * scale}
        if not optimizer.gradient_accumulation_steps:
            methods[keras_training.CLIP_METHOD] = lambda gradients: gradients
        if self._rule.owns_optimizer:
            methods[keras_training.UPDATE_METHOD] = advance
            methods[keras_training.DECAY_METHOD] = lambda variables: None
        elif optimizer.weight_decay and self._rule.lessens_decay:
            methods[keras_training.DECAY_METHOD] = decay
        with replaced(optimizer, **methods):
            optimizer.apply(self._split(gradient), self._variables)
        if self._rule.owns_optimizer:
            return moved
        return self._rule.observe(self._ops, before, self.flat(), shard)
