"""DDC-ASGD, the default: its form for optimizers that are black boxes, and the choice among its three forms."""

from __future__ import annotations

from nfdt.update_rules.base import Array, ArrayOps, OptimizerTraits, RuleState, UpdateRule
from nfdt.update_rules.blocks import Blocks
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_sgd import DelayedSGD
from nfdt.update_rules.reliability import Reliability, ReliableRule


class DelayedTransform(ReliableRule):
    """DDC-ASGD whose optimizer gets only the compensated, weighted gradient; algorithms 5.2, last paragraph."""

    lessens_decay = True

    def lessened(self, ops: ArrayOps, decay: Array, shard: RuleState) -> Array:
        """Return the weight decay in proportion to the optimizer's steps on gradients of lower weight."""
        return self.reliability.lessened(ops, decay, shard)

    def observe(self, ops: ArrayOps, before: Array, after: Array, shard: RuleState) -> RuleState:
        """Measure the step that the optimizer took."""
        return {**shard, "step_square": self.reliability.step_square(ops, shard, before - after)}


def make_ddc(traits: OptimizerTraits, blocks: Blocks, *, dc_lambda: float, dc_clip: float, gap: float) -> UpdateRule:
    """Return the form of DDC-ASGD for this optimizer."""
    sgd = traits.kind == "sgd" and 0 <= traits.momentum < 1
    reliability = Reliability(dc_lambda, dc_clip, gap, blocks, traits.decays, not sgd and traits.normalizes)
    if sgd:
        return DelayedSGD(reliability, traits.momentum, traits.nesterov)
    if traits.kind == "adam" and 0 < traits.beta_1 < 1:
        return DelayedAdam(reliability, traits)
    return DelayedTransform(reliability)
