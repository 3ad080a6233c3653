"""Update rules to compare with, which are no part of the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.workloads.reference_differences import (
    DelayedNesterov,
    DirectionCorrected,
    MomentumLookAhead,
    OuterNesterov,
    tensor_starts,
)
from benchmarks.workloads.reference_gradients import DanaDelayCompensated, ElementwiseDelayed
from nfdt.core.errors import UsageError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.presets import AXES, RULE_FACTS, RuleFacts
from nfdt.update_rules import DIFFERENCE_RULES, RULES
from nfdt.update_rules.base import OptimizerTraits, UpdateRule
from nfdt.update_rules.blocks import Blocks

REFERENCE_RULES = {rule.name: rule for rule in (ElementwiseDelayed, DanaDelayCompensated)}
REFERENCE_DIFFERENCES: dict[str, Callable[[int, Blocks], UpdateRule]] = {
    OuterNesterov.name: lambda workers, blocks: OuterNesterov(workers),
    DelayedNesterov.name: lambda workers, blocks: DelayedNesterov(workers),
    MomentumLookAhead.name: lambda workers, blocks: MomentumLookAhead(workers),
    DirectionCorrected.name: lambda workers, blocks: DirectionCorrected(workers, tensor_starts(blocks)),
}


@contextmanager
def reference_rules() -> Iterator[None]:
    """Add the rules of this file to those of the product within the context."""
    choices = AXES["update_rule"]
    AXES["update_rule"] = (*choices, *REFERENCE_RULES, *REFERENCE_DIFFERENCES)
    for name in REFERENCE_RULES:
        RULE_FACTS[name] = RuleFacts()
        RULES[name] = _make
    for name in REFERENCE_DIFFERENCES:
        RULE_FACTS[name] = RuleFacts(differences=True)
        DIFFERENCE_RULES[name] = lambda spec, *parts: REFERENCE_DIFFERENCES[spec.update_rule](*parts)
    try:
        yield
    finally:
        AXES["update_rule"] = choices
        for name in REFERENCE_RULES:
            del RULE_FACTS[name], RULES[name]
        for name in REFERENCE_DIFFERENCES:
            del RULE_FACTS[name], DIFFERENCE_RULES[name]


def _make(spec: AlgorithmSpec, traits: OptimizerTraits, blocks: Blocks) -> UpdateRule:
    if traits.kind != "sgd" or traits.nesterov:
        raise UsageError(
            f"Update rule {spec.update_rule}: expected SGD, with or without momentum. Received: optimizer of kind "
            f"{traits.kind!r}{', Nesterov' if traits.nesterov else ''}. Use update_rule 'ddc' with it."
        )
    return REFERENCE_RULES[spec.update_rule](traits.momentum)
