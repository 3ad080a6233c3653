"""Update rules for delayed gradients by name, with default values of their parameters; pure functions over arrays."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.update_rules.base import OptimizerTraits, Push, UpdateRule
from nfdt.update_rules.blocks import Blocks, Elements
from nfdt.update_rules.dc import AdaptiveDelayCompensated, DelayCompensated, DelayCompensatedMomentum
from nfdt.update_rules.ddc import make_ddc
from nfdt.update_rules.ddc_local import DelayedDifference, MeanDifference
from nfdt.update_rules.plain import Plain, StalenessScaled
from nfdt.update_rules.reliability import Reliability

__all__ = ["RULES", "OptimizerTraits", "Push", "UpdateRule", "make_rule"]

Factory = Callable[[AlgorithmSpec, OptimizerTraits, Blocks], UpdateRule]


def _strength(spec: AlgorithmSpec, default: float) -> float:
    return default if spec.dc_lambda is None else spec.dc_lambda


def _gap(spec: AlgorithmSpec, default: float) -> float:
    return default if spec.gap is None else spec.gap


def _ddc(spec: AlgorithmSpec, traits: OptimizerTraits, blocks: Blocks) -> UpdateRule:
    return make_ddc(traits, blocks, dc_lambda=_strength(spec, 0.2), dc_clip=spec.dc_clip, gap=_gap(spec, 1.0))


RULES: dict[str, Factory] = {
    "plain": lambda spec, traits, blocks: Plain(),
    "staleness-scaled": lambda spec, traits, blocks: StalenessScaled(),
    "dc": lambda spec, traits, blocks: DelayCompensated(_strength(spec, 0.04)),
    "dc-a": lambda spec, traits, blocks: AdaptiveDelayCompensated(_strength(spec, 2.0), spec.dc_decay),
    "dc-k": lambda spec, traits, blocks: DelayCompensatedMomentum(_strength(spec, 2.0), spec.dc_decay),
    "ddc": _ddc,
}


def _delayed_difference(spec: AlgorithmSpec, workers: int, blocks: Blocks) -> UpdateRule:
    return DelayedDifference(workers, Reliability(_strength(spec, 0.5), spec.dc_clip, _gap(spec, 2.0), blocks))


DIFFERENCE_RULES: dict[str, Callable[[AlgorithmSpec, int, Blocks], UpdateRule]] = {
    "plain": lambda spec, workers, blocks: MeanDifference(workers),
    "ddc": _delayed_difference,
}
"""Rules of workers that push what several steps of their own have changed."""


def make_rule(
    spec: AlgorithmSpec, traits: OptimizerTraits, blocks: Blocks | None = None, *, workers: int = 1
) -> UpdateRule:
    """Make the update rule ``spec.update_rule`` with the spec's parameters, for an optimizer with these traits.

    Args:
        spec: Algorithm of the job.
        traits: Traits of the user's optimizer.
        blocks: Blocks of elements for rules that use them; None: every element is a block.
        workers: Number of workers that push; needed for differences of several steps.
    """
    blocks = blocks or Elements()
    if spec.exchange_facts.local and not spec.consistency_facts.synchronous:
        return DIFFERENCE_RULES[spec.update_rule](spec, workers, blocks)
    return RULES[spec.update_rule](spec, traits, blocks)
