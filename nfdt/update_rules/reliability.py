"""The common part of all forms of DDC-ASGD: measured delay, compensation and trust by drift, and weight decay.

A gradient with a lower weight must decay the weights less. Otherwise the balance of gradients and decay would depend on
the number of workers. Let f be the factor of a block's gradients. An optimizer whose step is proportional to its
gradients then steps ``E f`` times as far, one that normalizes them ``E f / sqrt(E f^2)`` times. Weight decay is
multiplied with the same factor, from running means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nfdt.update_rules.base import Array, ArrayOps, Correction, Push, RuleState, UpdateRule, initial, scalar
from nfdt.update_rules.blocks import Blocks, Elements

NORM_EPSILON = 1e-30
STEP_EPSILON = 1e-10
STEP_DECAY = 0.99
QUICK_DELAY_DECAY = 0.9
SLOW_DELAY_DECAY = 0.99
QUICK_UPDATES = 50
FACTOR_DECAY = 0.99
WEIGHT_SHARE = 1 / 30
"""Share of a block's weights that counts like a typical step when the length of a drift is judged."""


@dataclass(frozen=True)
class Reliability:
    """Compensation of a delayed gradient and its trust factor, per block of elements.

    Attributes:
        dc_lambda: Strength of the compensation, >= 0; 0: none.
        dc_clip: Limit of the compensation as a multiple of the gradient, > 0.
        gap: Strength with which drift lowers the trust factor, >= 0; 0: no effect.
        blocks: Blocks of elements that share their factors.
        decays: Whether the optimizer has decoupled weight decay.
        normalizes: Whether the optimizer's step does not shrink with its gradients.
    """

    dc_lambda: float = 0.2
    dc_clip: float = 1.0
    gap: float = 1.0
    blocks: Blocks = field(default_factory=Elements)
    decays: bool = False
    normalizes: bool = False

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return S (``step_square``), one number for each block, and the scalars ``mean_delay`` (tbar) and ``seen``.

        With weight decay also the means of f (``factor``) and, if needed, of f^2, one number for each block.
        """
        zeros = ops.zeros_like(self.blocks.sums(ops, weights))
        state = {"step_square": zeros, "mean_delay": initial(weights), "seen": initial(weights)}
        if self.decays:
            state["factor"] = zeros + 1.0
        if self.decays and self.normalizes:
            state["factor_square"] = zeros + 1.0
        return state

    def factor(self, ops: ArrayOps, push: Push, shard: RuleState) -> Array:
        """Return the factor by which a gradient is compensated for its drift and weighted by it, shape ``(blocks,)``.

        In each block, with ``d = w - backup``, ``|.|`` the Euclidean norm and ``<., .>`` the scalar product over it::

            c = clip(dc_lambda <g, d> / (|g| sqrt(s)), -dc_clip, +dc_clip)
            f = (1 + c) / (1 + gap |d| / (sqrt(s) + |w| / 30))

        ``c g`` is ``lambda (g g^T) d``, the curvature of DC-ASGD before its diagonal is taken, with
        ``lambda = dc_lambda / (|g| sqrt(s))``. ``d = 0`` gives ``f = 1``; always ``f <= 1 + dc_clip``.
        """
        sums, gradient, drift = self.blocks.sums, push.gradient, push.weights - push.backup
        typical = ops.sqrt(shard["step_square"]) + STEP_EPSILON
        norms = ops.sqrt(sums(ops, gradient * gradient)) * typical
        change = self.dc_lambda * sums(ops, gradient * drift) / (norms + NORM_EPSILON)
        change = ops.minimum(ops.maximum(change, -self.dc_clip), self.dc_clip)
        harmless = typical + WEIGHT_SHARE * ops.sqrt(sums(ops, push.weights * push.weights))
        gap = ops.sqrt(sums(ops, drift * drift)) / harmless
        return (1.0 + change) / (1.0 + self.gap * gap)

    def gradient(self, ops: ArrayOps, push: Push, shard: RuleState) -> tuple[Array, RuleState]:
        """Return the gradient times its :meth:`factor`, and the shard state with updated means and counter."""
        factor = self.factor(ops, push, shard)
        state = count_push(ops, shard, push.staleness)
        share = factor_share(ops, state)
        for mean, value in (("factor", factor), ("factor_square", factor * factor)):
            if mean in shard:
                state[mean] = shard[mean] + share * (value - shard[mean])
        return self.blocks.scaled(ops, push.gradient, factor), state

    def lessened(self, ops: ArrayOps, decay: Array, shard: RuleState) -> Array:
        """Return the weight decay in proportion to the gradients' factor, shape ``(n,)``; unchanged without delay."""
        factor = shard["factor"]
        if self.normalizes:
            factor = factor / (ops.sqrt(shard["factor_square"]) + NORM_EPSILON)
        return self.blocks.scaled(ops, decay, factor)

    def step_square(self, ops: ArrayOps, shard: RuleState, step: Array) -> Array:
        """Return s, the exponential mean of the squared norms of the steps with weight decay, shape ``(blocks,)``."""
        return STEP_DECAY * shard["step_square"] + (1.0 - STEP_DECAY) * self.blocks.sums(ops, step * step)


class ReliableRule(UpdateRule):
    """Base of the forms of DDC-ASGD: every gradient is compensated for its drift and weighted by it."""

    name = "ddc"
    uses_backup = True

    def __init__(self, reliability: Reliability) -> None:
        self.reliability = reliability

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return the reliability state."""
        return self.reliability.init_shard(ops, weights)

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return the compensated gradient, weighted by its drift, at the full learning rate."""
        gradient, shard = self.reliability.gradient(ops, push, shard)
        return Correction(gradient, scalar(ops, push.staleness, 1.0), shard, worker)


def count_push(ops: ArrayOps, shard: RuleState, staleness: Array) -> RuleState:
    """Return the state with the means and the counter after one more push."""
    delay = mean_delay(ops, shard["mean_delay"], staleness, shard["seen"])
    return {**shard, "mean_delay": delay, "seen": shard["seen"] + 1.0}


def factor_share(ops: ArrayOps, shard: RuleState) -> Array:
    """Return the share of the newest push in the mean factor, 0-d: that of a mean, and at least .01."""
    return ops.maximum(1.0 / shard["seen"], scalar(ops, shard["seen"], 1.0 - FACTOR_DECAY))


def mean_delay(ops: ArrayOps, previous: Array, staleness: Array, seen: Array) -> Array:
    """Return tbar: the first push's delay, then a mean with decay .9 for pushes 1..49 and .99 after them."""
    quick, slow = scalar(ops, seen, QUICK_DELAY_DECAY), scalar(ops, seen, SLOW_DELAY_DECAY)
    decay = ops.where(seen < QUICK_UPDATES, quick, slow)
    return ops.where(seen < 1.0, staleness, decay * previous + (1.0 - decay) * staleness)


def updates_ahead(ops: ArrayOps, kept: Array, staleness: Array) -> Array:
    """Return the reserve's release in ``tau`` updates over that in the next one: ``(1 - m^tau) / (1 - m)``, 0-d."""
    return (1.0 - ops.power(kept, staleness)) / (1.0 - kept)


def kept_impulse(ops: ArrayOps, momentum: float, shard: RuleState) -> Array:
    """Return the share of the reserve kept per update, m = ``momentum ** (1 / (1 + tbar))``, 0-d: slower with delay."""
    delay = shard["mean_delay"]
    return ops.power(scalar(ops, delay, momentum), 1.0 / (1.0 + delay))
