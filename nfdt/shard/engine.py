"""The interface of an engine: weights, optimizer and rule state of one shard, and their updates.

Two engines implement it. :class:`~nfdt.shard.loop_engine.LoopEngine` runs rules that own the optimizer, in compiled
loops on NumPy arrays, and needs neither Keras nor TensorFlow. :class:`~nfdt.shard.keras_engine.KerasEngine` runs any
rule with any Keras optimizer, under XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nfdt.core.sharding.records import RecordTree
from nfdt.shard.held_state import HeldState
from nfdt.update_rules.base import OptimizerTraits, RuleState, UpdateRule

Vector = Any
"""A float32 vector of the shard's size, an array or a tensor; never changed once it is complete."""

LARGE = 1e8
"""Gradients at least this long are tried: a step that leaves values that are not finite is undone."""


class AnchoredBf16(NamedTuple):
    """Sum of ``anchor``, a shared float32 vector, and ``difference``, bfloat16 (an array holds its bits as uint16)."""

    anchor: Vector
    difference: Any


@dataclass(frozen=True)
class EngineReply:
    """Weights for a worker, and the rest of the result of the step that made them.

    Attributes:
        weights: Complete when ``finish`` has returned.
        compressed: Compressed form of the weights; None without an anchor.
        worker: The rule's new state for the worker; empty if no step was made.
        finish: Does the step's work, without the store's lock; None if it is done. Must be called once.
        parts: Yields the ranges of the weights, in order, as another thread's ``finish`` completes them; raises
            NfdtError if it does not. None if there is only one.
    """

    weights: Vector
    compressed: AnchoredBf16 | None = None
    worker: RuleState = field(default_factory=dict)
    finish: Callable[[], None] | None = None
    parts: Callable[[], Iterator[slice]] | None = None


@dataclass
class GradientAccumulator:
    """Weighted sum of gradients that are applied together.

    Attributes:
        total: Sum of the gradients times their denominators; in a merge also times their own learning-rate factor.
        weight: Sum of these weights in a merge, 0-d.
        denominator: Sum of the denominators; of gradients of sums, each 1.
        count: Number of gradients.
        longest: Length of the longest gradient.
        added: Whether the gradients are of sums: their union has their sum as its gradient, not their mean.
    """

    total: Vector
    weight: Any
    denominator: float = 0.0
    count: int = 0
    longest: float = 0.0
    added: bool = False

    def count_gradient(self, weight: float, length: float, added: bool) -> None:
        """Count a gradient that was added to the sum."""
        self.denominator += weight
        self.count += 1
        self.longest = max(self.longest, length)
        self.added = added

    @property
    def union(self) -> float:
        """Factor of the mean gradient in the gradient of the union."""
        return float(self.count) if self.added else 1.0


class Engine(Protocol):
    """Weights, optimizer and rule state of one shard. Used under the store's lock, but for ``EngineReply.finish``.

    Attributes:
        rule: The update rule.
    """

    rule: UpdateRule

    @property
    def traits(self) -> OptimizerTraits:
        """Traits of the user's optimizer."""

    @property
    def size(self) -> int:
        """Number of elements."""

    @property
    def updates(self) -> int:
        """Number of updates that the optimizer has applied."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""

    def weights(self) -> Vector:
        """Return the weights; later steps do not change them."""

    def tensor(self, vector: npt.NDArray[np.float32]) -> Vector:
        """Return an array in the engine's own form, if possible without a copy."""

    def array(self, vector: Vector | AnchoredBf16) -> npt.NDArray[np.float32]:
        """Return a read-only view of weights, decompressed if necessary."""

    def no_difference(self) -> Any:
        """Return the difference of an anchor to itself."""

    def new_worker(self) -> RuleState:
        """Return the rule's state for a worker that has not pushed yet."""

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
        """Apply one finite gradient; return None and restore the state if that left non-finite values.

        Args:
            gradient: Shape ``(size,)`` float32; unchanged until ``EngineReply.finish`` has returned.
            backup: Weights it was computed on, a vector or compressed; None for a rule that does not use them.
            staleness: Number of updates that it missed.
            worker: The rule's state for its worker.
            length: Norm of the gradient; a step with a large one can be undone.
            rate: Factor on the learning rate.
            anchor: Anchor of the compressed reply; either None at every call or a vector at every call.
        """

    def reply(self, staleness: int, *, anchor: Any = None) -> EngineReply:
        """Return weights for a worker whose push had this staleness and changed nothing; see :meth:`step`."""

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate.

        Raises:
            UsageError: the optimizer follows a schedule or a function, which Keras cannot replace either.
        """

    def wait_for_steps(self) -> None:
        """Wait until the steps whose results were returned are done."""

    def hold(self, *, weights_only: bool = False) -> HeldState:
        """Return the present state, which updates leave unchanged until it is released; its records are the engine's.

        Args:
            weights_only: Leave out everything but the weights.
        """

    def write(self, weights: npt.NDArray[np.float32], optimizer: Mapping[int, npt.NDArray[Any]]) -> None:
        """Replace the weights; given optimizer variables are replaced too, and the rule restarts from them."""

    def is_complete(self, optimizer: Mapping[int, npt.NDArray[Any]]) -> bool:
        """Whether :meth:`write` replaces the whole state, given these variables of the optimizer."""

    def restore(self, records: RecordTree) -> None:
        """Continue from records, after the weights and variables of the same moment were loaded.

        Raises:
            ShapeMismatch: the records belong to another program or rule.
        """

    def restored(self, state: RecordTree, initial: RuleState) -> RuleState:
        """Return a state from records; raise ShapeMismatch if it differs from an initial one in form."""


class MergingEngine(Engine, Protocol):
    """Engine that can apply several gradients as one."""

    def new_accumulator(self) -> GradientAccumulator:
        """Return an accumulator without gradients."""

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

    def accumulate_part(
        self, accumulator: GradientAccumulator, gradient: Vector, weight: float, length: float, *, added: bool = False
    ) -> None:
        """Add one raw, finite gradient of a round to ``accumulator``; see :class:`~nfdt.shard.messages.Gradient`."""

    def apply_round(self, accumulator: GradientAccumulator, worker: RuleState) -> RuleState | None:
        """Apply the gradient of a whole round, computed on the current weights; return None as in :meth:`step`.

        Returns the rule's new state for all workers.
        """

    def apply(self, accumulator: GradientAccumulator) -> bool:
        """Apply the union of corrected gradients, each at its own rate factor; False if undone; see :meth:`step`."""
