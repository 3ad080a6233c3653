"""DDC-ASGD for any other optimizer: only the gradient is transformed, the optimizer is a black box."""

from __future__ import annotations

from nfdt.update_rules.base import Array, ArrayOps, Correction, Identity, Push, State, scalar
from nfdt.update_rules.reliability import Strengths, init_reliability, reliable_gradient, step_square


class DelayedTransform(Identity):
    """The user's optimizer sees the compensated, trusted gradient only; algorithms 5.2, last paragraph."""

    name = "ddc"
    uses_backup = True

    def __init__(self, strengths: Strengths) -> None:
        self.strengths = strengths

    def init_shard(self, ops: ArrayOps, weights: Array) -> State:
        """The reliability state."""
        return init_reliability(ops, weights)

    def correct(self, ops: ArrayOps, push: Push, shard: State, worker: State) -> Correction:
        """The compensated gradient, trusted by its drift, at the full learning rate."""
        gradient, shard = reliable_gradient(ops, push, shard, self.strengths)
        return Correction(gradient, scalar(ops, push.staleness, 1.0), shard, worker)

    def observe(self, ops: ArrayOps, before: Array, after: Array, shard: State) -> State:
        """Measure the step the optimizer took."""
        return {**shard, "step_square": step_square(shard, before - after)}
