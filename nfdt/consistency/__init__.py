"""Consistency policies, which decide the workers that may proceed, by name; pure."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.consistency.base import ConsistencyPolicy
from nfdt.consistency.policies import Barrier, BoundedStaleness, Free, Rounds, Softsync
from nfdt.core.specs.algorithm import AlgorithmSpec

__all__ = ["POLICIES", "Barrier", "ConsistencyPolicy", "Free", "Rounds", "make_policy"]

POLICIES: dict[str, Callable[[AlgorithmSpec], ConsistencyPolicy]] = {
    "bsp": lambda spec: Barrier(),
    "free": lambda spec: Free(),
    "ssp": lambda spec: BoundedStaleness(spec.staleness_bound),
    "softsync": lambda spec: Softsync(spec.softsync_n),
}


def make_policy(spec: AlgorithmSpec) -> ConsistencyPolicy:
    """Return a new policy of the kind ``spec.consistency``."""
    return POLICIES[spec.consistency](spec)
