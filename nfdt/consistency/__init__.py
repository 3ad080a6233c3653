"""Consistency policies, which decide the workers that may proceed: pure, one file per policy."""

from nfdt.consistency.barrier import Barrier
from nfdt.consistency.base import ConsistencyPolicy
from nfdt.consistency.free import Free
from nfdt.consistency.registry import POLICIES, make_policy

__all__ = ["POLICIES", "Barrier", "ConsistencyPolicy", "Free", "make_policy"]
