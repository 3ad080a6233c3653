"""The consistency policies by name."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.consistency.barrier import Barrier
from nfdt.consistency.base import ConsistencyPolicy
from nfdt.consistency.bounded import BoundedStaleness
from nfdt.consistency.free import Free
from nfdt.consistency.softsync import Softsync
from nfdt.core.specs.algorithm import AlgorithmSpec

POLICIES: dict[str, Callable[[AlgorithmSpec], ConsistencyPolicy]] = {
    "bsp": lambda spec: Barrier(),
    "free": lambda spec: Free(),
    "ssp": lambda spec: BoundedStaleness(spec.staleness_bound),
    "softsync": lambda spec: Softsync(spec.softsync_n),
}


def make_policy(spec: AlgorithmSpec) -> ConsistencyPolicy:
    """Return a new policy of the kind ``spec.consistency``."""
    return POLICIES[spec.consistency](spec)
