"""The interface of an update rule: pure functions over arrays, plus explicit state.

A rule is written once with Python operators and the few functions of :class:`ArrayOps`, so that the
same lines run under XLA on a shard and in NumPy in tests and the simulator. Nothing is mutated:
every moment of a push takes state and returns new state.

The moments of one push, in order::

    correct       (gradient, weights, backup, tau)  -> the gradient for the optimizer
    advance       (gradient, weights, decay, rate)  -> the new weights      only when owns_optimizer
    lessened      (decay)                           -> the weight decay     only when lessens_decay
    observe       (weights before, weights after)   -> state                only when the user's optimizer ran
    reply         (weights, decay)                  -> the weights for this worker: its next backup

``decay`` is the decoupled weight decay at a learning rate of 1, shape ``(n,)``: the decay times the weights for a
variable that decays, else 0; None for an optimizer without weight decay.

``enter`` and ``leave`` translate between the slots of the user's optimizer and the rule's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from nfdt.core.errors import ShapeMismatch

Array = Any
"""A NumPy array or a TensorFlow tensor."""

RuleState = dict[str, Array]
"""Named arrays in the dtype of the weights: ``(n,)`` of the shard's size, one number for each block, or 0-d."""


class ArrayOps(Protocol):
    """Functions that a rule may call; the module ``numpy`` itself satisfies this interface."""

    def sqrt(self, x: Array, /) -> Array: ...  # noqa: D102
    def abs(self, x: Array, /) -> Array: ...  # noqa: D102
    def minimum(self, x: Array, y: Array, /) -> Array: ...  # noqa: D102
    def maximum(self, x: Array, y: Array, /) -> Array: ...  # noqa: D102
    def power(self, x: Array, y: Array, /) -> Array: ...  # noqa: D102
    def where(self, condition: Array, x: Array, y: Array, /) -> Array: ...  # noqa: D102
    def zeros_like(self, x: Array, /) -> Array: ...  # noqa: D102
    def sum(self, x: Array, axis: int, /) -> Array: ...  # noqa: D102
    def reshape(self, x: Array, shape: tuple[int, ...], /) -> Array: ...  # noqa: D102
    def concatenate(self, arrays: Sequence[Array], /) -> Array: ...  # noqa: D102


@dataclass(frozen=True)
class OptimizerTraits:
    """Properties of the user's optimizer.

    ``kind`` is ``"sgd"`` (``momentum``, ``nesterov`` apply), ``"adam"`` (``beta_1``, ``beta_2``,
    ``epsilon`` apply: Adam and AdamW without amsgrad) or ``"other"``: a black box.
    """

    kind: Literal["sgd", "adam", "other"] = "other"
    normalizes: bool = True
    """Whether its step does not shrink with its gradients, as one that divides by their size; unused for "sgd"."""
    decays: bool = False
    """Whether it has decoupled weight decay."""
    momentum: float = 0.0
    nesterov: bool = False
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


@dataclass(frozen=True)
class Push:
    """One arriving gradient and the state of the shard.

    Attributes:
        gradient: Mean gradient ``g`` of one worker's batch, shape ``(n,)``.
        weights: Current weights ``w`` of the shard, shape ``(n,)``.
        backup: Weights on which *this worker* computed ``g``, shape ``(n,)``.
        staleness: ``tau``, number of updates applied since the backup; 0-d, dtype of the weights.
        updates: Number of updates applied to the shard so far (``optimizer.iterations``); 0-d, dtype of the weights.
    """

    gradient: Array
    weights: Array
    backup: Array
    staleness: Array
    updates: Array


@dataclass(frozen=True)
class Correction:
    """The gradient to apply, a factor for the learning rate (0-d), and the new states."""

    gradient: Array
    learning_rate_scale: Array
    shard: RuleState
    worker: RuleState


@dataclass(frozen=True)
class Advance:
    """The new weights, shape ``(n,)``, and the new shard state."""

    weights: Array
    shard: RuleState


class UpdateRule:
    """Correction of delayed gradients. See the module's docstring for the order of the calls.

    The methods here are those of a rule without state that changes neither gradients nor weights.

    Attributes:
        name: Name of the rule.
        owns_optimizer: Whether ``advance`` replaces the optimizer's step.
        looks_ahead: Whether ``reply`` returns other weights than the current ones.
        uses_backup: Whether ``correct`` uses ``push.backup``; else a shard need not keep it, and may pass any array.
        lessens_decay: Whether the weight decay of the user's optimizer is :meth:`lessened`; a rule that owns it decays
            itself.
    """

    name: ClassVar[str]
    owns_optimizer: bool = False
    looks_ahead: bool = False
    uses_backup: bool = False
    lessens_decay: bool = False

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return the initial state of one shard; ``weights`` gives shape and dtype."""
        return {}

    def init_worker(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return the initial state per worker, in addition to its backup."""
        return {}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return the gradient that replaces the delayed one for the optimizer; here the same, at the full rate."""
        return Correction(push.gradient, scalar(ops, push.staleness, 1.0), shard, worker)

    def advance(
        self,
        ops: ArrayOps,
        gradient: Array,
        weights: Array,
        learning_rate: Array,
        updates: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Advance:
        """Return the result of a step in place of the user's optimizer and weight decay. Only if ``owns_optimizer``.

        ``updates`` counts the updates applied before this one. Here it is a step of plain gradient descent.
        """
        return Advance(weights - learning_rate * (gradient if decay is None else gradient + decay), shard)

    def lessened(self, ops: ArrayOps, decay: Array, shard: RuleState) -> Array:
        """Return ``decay`` in proportion to the weight of the gradients. Called only when ``lessens_decay``."""
        return decay

    def observe(self, ops: ArrayOps, before: Array, after: Array, shard: RuleState) -> RuleState:
        """Measure the step of the user's optimizer. Called only when not ``owns_optimizer``."""
        return shard

    def reply(
        self,
        ops: ArrayOps,
        weights: Array,
        learning_rate: Array,
        staleness: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Array:
        """Return the weights for a worker whose push had this staleness, shape ``(n,)``; they become its backup."""
        return weights

    def enter(self, ops: ArrayOps, slots: RuleState, updates: Array, shard: RuleState) -> RuleState:
        """Return the state for a warm start from the user's optimizer slots (``momentum`` | ``m``, ``v``)."""
        return shard

    def leave(self, ops: ArrayOps, shard: RuleState) -> RuleState:
        """Return the optimizer slots that continue from the rule's current state."""
        return {}


def check_state(received: Mapping[str, Any], initial: RuleState) -> None:
    """Raise ShapeMismatch unless a restored state has the names and shapes of the initial one."""
    shapes, wanted = ({name: tuple(np.shape(value)) for name, value in state.items()} for state in (received, initial))
    if shapes != wanted:
        raise ShapeMismatch(
            f"State of the update rule: expected {wanted}. Received: {shapes}. It belongs to another job; start from "
            "a snapshot of this one."
        )


def scalar(ops: ArrayOps, like: Array, value: float) -> Array:
    """Return ``value`` in the dtype of the 0-d array ``like``."""
    return ops.zeros_like(like) + value


def initial(weights: Array, value: float = 0.0) -> Array:
    """Return a 0-d NumPy array of ``value`` in the dtype of ``weights``, for a rule's initial state."""
    dtype = getattr(weights.dtype, "name", weights.dtype)
    return np.asarray(value, dtype)
