"""The engine for every Keras optimizer and every rule: functions under XLA; see :mod:`nfdt.shard.engine`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import UsageError
from nfdt.core.sharding.records import RecordTree
from nfdt.model.keras_internals.training import has_fixed_learning_rate
from nfdt.shard.engine import LARGE, AnchoredBf16, EngineReply, GradientAccumulator, Vector
from nfdt.shard.held_state import HeldState, StateHolder
from nfdt.shard.optimizer import BuiltOptimizer
from nfdt.shard.step import EngineOps, FusedStep
from nfdt.update_rules.base import OptimizerTraits, RuleState, UpdateRule, check_state


def ops_of_backend() -> EngineOps:
    """Return the functions of the backend that Keras has loaded; only that one is imported."""
    if keras.backend.backend() == "jax":
        from nfdt.shard import jax_ops

        return jax_ops
    from nfdt.shard import tensors

    return tensors


def _given(vector: Any) -> Any:
    """Return a tuple with or without a vector."""
    return () if vector is None else (vector,)


@dataclass
class KerasEngine(StateHolder):
    """Implementation of :class:`~nfdt.shard.engine.Engine`, see there for the methods.

    Args:
        built: The user's optimizer on this shard's variables.
        rule: The update rule.
        ops: Functions of the backend; default: those of the backend that Keras has loaded.
    """

    built: BuiltOptimizer
    rule: UpdateRule
    ops: EngineOps = field(default_factory=ops_of_backend)
    _shard: RuleState = field(init=False)

    def __post_init__(self) -> None:
        self._fused = FusedStep(self.built, self.rule, self.ops)
        self._take_over()

    @property
    def traits(self) -> OptimizerTraits:
        """Traits of the optimizer."""
        return self.built.traits

    @property
    def layout(self) -> ParameterLayout:
        """Variables of the shard."""
        return self.built.plan.layout

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.layout.size

    @property
    def updates(self) -> int:
        """Number of updates that the optimizer has applied."""
        return int(self._fused.updates())

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        return float(self.built.optimizer.learning_rate)

    def weights(self) -> Vector:
        """Return the weights; later steps do not change them."""
        if not self.size:
            return self.ops.zeros(0)
        return self.ops.read(self.built.variables[0]) if self.built.plan.flat else self._fused.flat()

    def tensor(self, vector: npt.NDArray[np.float32]) -> Vector:
        """Return a gradient from the network in the backend's form."""
        return self.ops.vector(vector)

    def array(self, vector: Vector | AnchoredBf16) -> npt.NDArray[np.float32]:
        """Return a read-only view of weights, decompressed if necessary."""
        return self.ops.array(self.ops.decompress(vector))

    def no_difference(self) -> Any:
        """Return the difference of an anchor to itself."""
        return self.ops.no_difference(self.size)

    def new_worker(self) -> RuleState:
        """Return the rule's state for a worker that has not pushed yet."""
        return self._state(self.rule.init_worker(self.ops, self._fused.flat()))

    def new_accumulator(self) -> GradientAccumulator:
        """Return an accumulator without gradients."""
        return GradientAccumulator(self.ops.zeros(self.size), self.ops.scalar(0.0))

    def step(
        self,
        gradient: Vector,
        backup: Any,
        staleness: int,
        worker: RuleState,
        *,
        length: float,
        rate: float = 1.0,
        anchor: Any = None,
    ) -> EngineReply | None:
        """Apply one finite gradient at once."""
        before = self._kept(length * rate)
        numbers = self.ops.scalar(staleness), self.ops.scalar(rate)
        answer, self._shard, worker = self._fused.step(
            gradient, _given(backup), *numbers, self._shard, worker, _given(anchor)
        )
        return self._engine_reply(answer, anchor, worker) if self._stands(before, worker) else None

    def accumulate(
        self,
        accumulator: GradientAccumulator,
        gradient: Vector,
        backup: Any,
        staleness: int,
        worker: RuleState,
        weight: float,
        *,
        length: float,
        added: bool = False,
    ) -> RuleState:
        """Correct one finite gradient and add it to ``accumulator``; return the worker's new state."""
        sums = (accumulator.total, accumulator.weight, self.ops.scalar(weight))
        args = (*sums, gradient, _given(backup), self.ops.scalar(staleness), self._shard, worker)
        accumulator.total, accumulator.weight, self._shard, worker = self._fused.accumulate(*args)
        accumulator.count_gradient(weight, length, added)
        return worker

    def accumulate_part(
        self, accumulator: GradientAccumulator, gradient: Vector, weight: float, length: float, *, added: bool = False
    ) -> None:
        """Add one raw, finite gradient of a round to ``accumulator``; see :class:`~nfdt.shard.messages.Gradient`."""
        accumulator.total = self._fused.accumulate_part(accumulator.total, self.ops.scalar(weight), gradient)
        accumulator.count_gradient(weight, length, added)

    def apply_round(self, accumulator: GradientAccumulator, worker: RuleState) -> RuleState | None:
        """Apply the gradient of a whole round, computed on the current weights; return None as in :meth:`step`.

        Returns the rule's new state for all workers.
        """
        before = self._kept(accumulator.longest * accumulator.union)
        union = accumulator.total / self.ops.scalar(accumulator.denominator / accumulator.union)
        now = self.weights() if self.rule.uses_backup else None
        args = (union, _given(now), self.ops.scalar(0.0), self.ops.scalar(1.0), self._shard, worker, ())
        _, self._shard, worker = self._fused.apply_round(*args)
        return worker if self._stands(before, worker) else None

    def apply(self, accumulator: GradientAccumulator) -> bool:
        """Apply the union of corrected gradients, each at its own rate factor; False if undone; see :meth:`step`."""
        before = self._kept(accumulator.longest * accumulator.union)
        total = accumulator.total * self.ops.scalar(accumulator.union) if accumulator.added else accumulator.total
        sums = (total, accumulator.weight, self.ops.scalar(accumulator.denominator))
        self._shard = self._fused.apply(*sums, self._shard)
        return self._stands(before, {})

    def reply(self, staleness: int, *, anchor: Any = None) -> EngineReply:
        """Return weights for a worker whose push had this staleness and changed nothing; see :meth:`step`."""
        if anchor is None and not self.rule.looks_ahead:
            return EngineReply(self.weights())
        answer = self._fused.reply(self.ops.scalar(staleness), self._shard, _given(anchor))
        return self._engine_reply(answer, anchor, {})

    def _engine_reply(self, answer: Any, anchor: Any, worker: RuleState) -> EngineReply:
        if anchor is not None:
            return EngineReply(answer[0], AnchoredBf16(anchor, answer[1]), worker)
        return EngineReply(answer[0] if answer else self.weights(), None, worker)

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate.

        Raises:
            UsageError: the optimizer follows a schedule or a function, which Keras cannot replace either.
        """
        optimizer = self.built.optimizer
        if not has_fixed_learning_rate(optimizer):
            raise UsageError(
                f"Learning rate: expected a plain number in the optimizer to replace by {value}. Received: a schedule."
            )
        optimizer.learning_rate = value

    def wait_for_steps(self) -> None:
        """Return at once: every step is done when its result is returned."""

    def is_complete(self, optimizer: Mapping[int, npt.NDArray[Any]]) -> bool:
        """Whether the variables are all that the optimizer has."""
        return self.built.is_complete(optimizer)

    def hold(self, *, weights_only: bool = False) -> HeldState:
        """Return the present state; see :class:`Engine`. The backend replaces values, and does not change them."""
        weights = self.ops.array(self.weights())
        if weights_only:
            return HeldState(weights, {})
        self._give_back()
        optimizer = self.built.read()
        own = {str(i): array for i, array in self.built.own(optimizer).items()}
        return HeldState(weights, optimizer, {"rule": dict(self._shard), "optimizer": own})

    def write(self, weights: npt.NDArray[np.float32], optimizer: Mapping[int, npt.NDArray[Any]]) -> None:
        """Replace the weights; given optimizer variables are replaced too, and the rule restarts from them."""
        self._fused.assign(self.built.variables, self.ops.given(np.asarray(weights, np.float32)))
        if optimizer:
            self._give_back()
            self.built.load(optimizer)
            self._take_over()

    def restore(self, records: RecordTree) -> None:
        """Continue from records, after the weights and variables of the same moment were loaded.

        Raises:
            ShapeMismatch: the records belong to another program or rule.
        """
        self.built.load({int(index): array for index, array in records.get("optimizer", {}).items()})
        self._shard = self.restored(records.get("rule", {}), self._shard)

    def restored(self, state: RecordTree, initial: RuleState) -> RuleState:
        """Return a state from records as tensors; raise ShapeMismatch if it differs from an initial one in form."""
        check_state(state, initial)
        return self._state(state)

    def _state(self, state: Mapping[str, Any]) -> RuleState:
        return {name: self.ops.given(np.asarray(value, np.float32)) for name, value in state.items()}

    def _kept(self, length: float) -> tuple[list[Any], RuleState] | None:
        """Copy the state that a step changes before a large gradient is tried; return None for other gradients."""
        if length < LARGE:
            return None
        return [self.ops.copy(variable.value) for variable in self._moved()], self._shard

    def _stands(self, before: tuple[list[Any], RuleState] | None, worker: RuleState) -> bool:
        """Return whether a step is kept; a step on trial that left non-finite values is undone."""
        moved = self._moved()
        if before is None or self.ops.are_finite([*(v.value for v in moved), *self._shard.values(), *worker.values()]):
            return True
        values, self._shard = before
        for variable, value in zip(moved, values, strict=True):
            variable.assign(value)
        return False

    def _moved(self) -> list[Any]:
        return [*self.built.variables, *self.built.optimizer.variables]

    def _give_back(self) -> None:
        """Fill the optimizer's own slots from the state of a rule that owns them."""
        owned = self._fused.owned_slots()
        left = self.rule.leave(self.ops, self._shard) if owned else {}
        for name, variables in owned.items():
            self._fused.assign(variables, left[name])

    def _take_over(self) -> None:
        self._shard = self._state(self.rule.init_shard(self.ops, self._fused.flat()))
        if self.rule.owns_optimizer:
            slots = {
                name: self._fused.joined([v.value for v in held]) for name, held in self._fused.owned_slots().items()
            }
            self._shard = self._state(self.rule.enter(self.ops, slots, self._fused.updates(), self._shard))
