"""DDC-ASGD for any other optimizer: only the gradient is transformed, the optimizer is a black box."""

from __future__ import annotations

from nfdt.update_rules.base import Array, ArrayOps, Correction, IdentityRule, Push, RuleState, scalar
from nfdt.update_rules.reliability import Reliability


class DelayedTransform(IdentityRule):
    """DDC-ASGD whose optimizer gets only the compensated, weighted gradient; algorithms 5.2, last paragraph."""

    name = "ddc"
    uses_backup = True
    lessens_decay = True

    def __init__(self, reliability: Reliability) -> None:
        self.reliability = reliability

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return the reliability state."""
        return self.reliability.init_shard(ops, weights)

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return the compensated gradient, weighted by its drift, at the full learning rate."""
        gradient, shard = self.reliability.gradient(ops, push, shard)
        return Correction(gradient, scalar(ops, push.staleness, 1.0), shard, worker)

    def lessened(self, ops: ArrayOps, decay: Array, shard: RuleState) -> Array:
        """Return the weight decay in proportion to the optimizer's steps on gradients of lower weight."""
        return self.reliability.lessened(ops, decay, shard)

    def observe(self, ops: ArrayOps, before: Array, after: Array, shard: RuleState) -> RuleState:
        """Measure the step that the optimizer took."""
        return {**shard, "step_square": self.reliability.step_square(ops, shard, before - after)}
