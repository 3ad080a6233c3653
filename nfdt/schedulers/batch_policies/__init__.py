"""Batch policies: the size of each worker's local batch, one file per policy."""

from nfdt.schedulers.batch_policies.base import BatchPolicy
from nfdt.schedulers.batch_policies.fixed import FixedBatch
from nfdt.schedulers.batch_policies.registry import BATCH_POLICIES, find_batch_policy

__all__ = ["BATCH_POLICIES", "BatchPolicy", "FixedBatch", "find_batch_policy"]
