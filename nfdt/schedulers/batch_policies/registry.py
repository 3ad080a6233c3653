"""The batch policies by name."""

from __future__ import annotations

from nfdt.schedulers.batch_policies.base import BatchPolicy
from nfdt.schedulers.batch_policies.dynamic import DynamicBatch
from nfdt.schedulers.batch_policies.fixed import FixedBatch

BATCH_POLICIES: dict[str, BatchPolicy] = {"fixed": FixedBatch(), "dbs": DynamicBatch()}


def find_batch_policy(name: str) -> BatchPolicy:
    """Return the batch policy of this name on the axis."""
    return BATCH_POLICIES[name]
