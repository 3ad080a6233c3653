"""Asynchronous SGD with unchanged gradients: plain, also the rule of ``bsp`` and ``ssp``, or at a rate by the delay."""

from __future__ import annotations

from nfdt.update_rules.base import ArrayOps, Correction, Push, RuleState, UpdateRule, scalar


class Plain(UpdateRule):
    """The identity in every moment: ``w <- w - eta * g`` with the user's own optimizer."""

    name = "plain"


class StalenessScaled(UpdateRule):
    """Rule that applies each gradient at ``eta / max(1, tau)``; without state.

    References:
        Zhang et al., IJCAI 2016, "Staleness-aware Async-SGD"; eta at tau = 0 as in ElasticDL.
    """

    name = "staleness-scaled"

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return the unchanged gradient, at ``1 / max(1, tau)`` of the learning rate."""
        one = scalar(ops, push.staleness, 1.0)
        return Correction(push.gradient, one / ops.maximum(one, push.staleness), shard, worker)
