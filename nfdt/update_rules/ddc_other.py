"""DDC-ASGD for any other optimizer: only the gradient is transformed, the optimizer is a black box."""

from __future__ import annotations

from nfdt.update_rules.base import Array, ArrayOps, Correction, IdentityRule, Push, RuleState, scalar
from nfdt.update_rules.reliability import Reliability


class DelayedTransform(IdentityRule):
    """The user's optimizer sees the compensated, trusted gradient only; algorithms 5.2, last paragraph."""

    name = "ddc"
    uses_backup = True
    lessens_decay = True

    def __init__(self, reliability: Reliability) -> None:
        self.reliability = reliability

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """The reliability state."""
        return self.reliability.init_shard(ops, weights)

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """The compensated gradient, trusted by its drift, at the full learning rate."""
        gradient, shard = self.reliability.gradient(ops, push, shard)
        return Correction(gradient, scalar(ops, push.staleness, 1.0), shard, worker)

    def lessened(self, ops: ArrayOps, decay: Array, shard: RuleState) -> Array:
        """Weight decay in proportion to the optimizer's steps on gradients that count less."""
        return self.reliability.lessened(ops, decay, shard)

    def observe(self, ops: ArrayOps, before: Array, after: Array, shard: RuleState) -> RuleState:
        """Measure the step the optimizer took."""
        return {**shard, "step_square": self.reliability.step_square(ops, shard, before - after)}
