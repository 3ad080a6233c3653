"""Update rules for delayed gradients: pure functions over arrays, one file per published rule."""

from nfdt.update_rules.base import (
    Advance,
    Array,
    ArrayOps,
    Correction,
    OptimizerTraits,
    Push,
    RuleState,
    UpdateRule,
)
from nfdt.update_rules.registry import RULES, make_rule

__all__ = [
    "RULES",
    "Advance",
    "Array",
    "ArrayOps",
    "Correction",
    "OptimizerTraits",
    "Push",
    "RuleState",
    "UpdateRule",
    "make_rule",
]
