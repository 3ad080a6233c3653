"""The learning rate of a delayed gradient divided by its delay."""

from __future__ import annotations

from nfdt.update_rules.base import ArrayOps, Correction, IdentityRule, Push, RuleState, scalar


class StalenessScaled(IdentityRule):
    """Rule that applies each gradient at ``eta / max(1, tau)``; without state.

    References:
        Zhang et al., IJCAI 2016, "Staleness-aware Async-SGD"; eta at tau = 0 as in ElasticDL.
    """

    name = "staleness-scaled"

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return the unchanged gradient, at ``1 / max(1, tau)`` of the learning rate."""
        one = scalar(ops, push.staleness, 1.0)
        return Correction(push.gradient, one / ops.maximum(one, push.staleness), shard, worker)
