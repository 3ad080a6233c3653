"""DDC-ASGD, the default: the choice among its three forms by the user's optimizer."""

from __future__ import annotations

from nfdt.update_rules.base import OptimizerTraits, UpdateRule
from nfdt.update_rules.blocks import Blocks
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_other import DelayedTransform
from nfdt.update_rules.ddc_sgd import DelayedSGD
from nfdt.update_rules.reliability import Reliability


def make_ddc(traits: OptimizerTraits, blocks: Blocks, *, dc_lambda: float, dc_clip: float, gap: float) -> UpdateRule:
    """Return the form of DDC-ASGD for this optimizer."""
    sgd = traits.kind == "sgd" and 0 <= traits.momentum < 1
    reliability = Reliability(dc_lambda, dc_clip, gap, blocks, traits.decays, not sgd and traits.normalizes)
    if sgd:
        return DelayedSGD(reliability, traits.momentum, traits.nesterov)
    if traits.kind == "adam" and 0 < traits.beta_1 < 1:
        return DelayedAdam(reliability, traits)
    return DelayedTransform(reliability)
