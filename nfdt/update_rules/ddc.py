"""DDC-ASGD, the default: which of its three forms serves the user's optimizer."""

from __future__ import annotations

from nfdt.update_rules.base import OptimizerTraits, UpdateRule
from nfdt.update_rules.ddc_adam import DelayedAdam
from nfdt.update_rules.ddc_other import DelayedTransform
from nfdt.update_rules.ddc_sgd import DelayedSGD
from nfdt.update_rules.reliability import Strengths

GAP_SGD = 0.5
GAP_OTHERS = 1.0


def make_ddc(
    traits: OptimizerTraits, *, dc_lambda: float, dc_clip: float, gap: float | None, decay: float
) -> UpdateRule:
    """The form of DDC-ASGD for this optimizer; ``gap=None`` takes the form's default."""
    sgd = traits.kind == "sgd" and 0 <= traits.momentum < 1
    if gap is None:
        gap = GAP_SGD if sgd else GAP_OTHERS
    strengths = Strengths(dc_lambda, dc_clip, gap, decay)
    if sgd:
        return DelayedSGD(strengths, traits.momentum, traits.nesterov)
    if traits.kind == "adam" and 0 < traits.beta_1 < 1:
        return DelayedAdam(strengths, traits)
    return DelayedTransform(strengths)
