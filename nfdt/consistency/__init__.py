"""Who may proceed: pure policies, one file each."""

from nfdt.consistency.base import ConsistencyPolicy
from nfdt.consistency.registry import POLICIES, make_policy

__all__ = ["POLICIES", "ConsistencyPolicy", "make_policy"]
