"""DC-ASGDK, the baseline of the DDC-ASGD thesis: compensated gradients in front of naive server momentum."""

from __future__ import annotations

from nfdt.update_rules.base import Array, ArrayOps, Correction, IdentityRule, Push, RuleState, scalar
from nfdt.update_rules.dc import EPSILON, compensation, mean_square


class DelayCompensatedMomentum(IdentityRule):
    """The adaptive compensation of DC-ASGD-a with one mean square for all workers.

    The user's own momentum optimizer runs on the compensated gradient with its single fixed
    coefficient, whatever the delay. It is known to become unstable with many workers.

    References:
        Our reading of "impulse delay compensation"; the thesis' text is not public in full.
    """

    name = "dc-k"
    uses_backup = True

    def __init__(self, dc_lambda: float, decay: float) -> None:
        self.dc_lambda = dc_lambda
        self.decay = decay

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return ``mean_square`` of all gradients, shape ``(n,)``, zero."""
        return {"mean_square": ops.zeros_like(weights)}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Update the shared mean square with ``g``, then compensate with it."""
        square = mean_square(shard["mean_square"], push.gradient, self.decay)
        gradient = push.gradient + compensation(push, self.dc_lambda / ops.sqrt(square + EPSILON))
        return Correction(gradient, scalar(ops, push.staleness, 1.0), {**shard, "mean_square": square}, worker)
