"""DDC-ASGD for Adam and AdamW: pooled first moment, released according to the delay, with look-ahead.

With G the reserve in gradient units, W its scalar bias correction, m the kept share, n the number of
this update::

    v  = b2 v + (1 - b2) gc*gc            den = (sqrt(v) + eps) / sqrt(1 - b2^n)
    b  = (1 - m) W + (1 - b1)             W   = m W + b1
    dw = lr ((1 - m) G + (1 - b1) gc) / (b den)               G = m G + b1 gc

``den`` has Keras' placement of epsilon. At tau = 0 (m = b1) put G = b1 M / (1 - b1) with M Keras'
first moment: then (1 - m) G + (1 - b1) gc is the new M, W = b1 (1 - b1^n) / (1 - b1) after n
updates, so b = 1 - b1^n, and dw is Keras' Adam exactly. Weight decay: see :mod:`nfdt.update_rules.ddc_sgd`; b1 is the
reserve's share of a gradient.
"""

from __future__ import annotations

from nfdt.update_rules.base import Advance, Array, ArrayOps, OptimizerTraits, RuleState, initial, scalar
from nfdt.update_rules.reliability import Reliability, ReliableRule, kept_impulse, updates_ahead


class DelayedAdam(ReliableRule):
    """DDC-ASGD around Adam and AdamW (0 < beta_1 < 1); algorithms 5.2."""

    owns_optimizer = True
    looks_ahead = True

    def __init__(self, reliability: Reliability, traits: OptimizerTraits) -> None:
        super().__init__(reliability)
        self.beta_1 = traits.beta_1
        self.beta_2 = traits.beta_2
        self.epsilon = traits.epsilon

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return the reliability state, G (``reserve``), v (``second_moment``), W (``reserve_bias``), ``scale``.

        ``scale`` is b / sqrt(1 - b2^n) of the last update, kept for the look-ahead.
        """
        return {
            **super().init_shard(ops, weights),
            "reserve": ops.zeros_like(weights),
            "second_moment": ops.zeros_like(weights),
            "reserve_bias": initial(weights),
            "scale": initial(weights, 1.0),
        }

    def advance(
        self,
        ops: ArrayOps,
        gradient: Array,
        weights: Array,
        learning_rate: Array,
        updates: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Advance:
        """Return the result of an Adam step whose first moment is released according to the delay."""
        kept = kept_impulse(ops, self.beta_1, shard)
        reserve, bias = shard["reserve"], shard["reserve_bias"]
        second = self.beta_2 * shard["second_moment"] + (1.0 - self.beta_2) * gradient * gradient
        scale = self.scale(ops, kept, bias, updates)
        moment = (1.0 - kept) * reserve + (1.0 - self.beta_1) * gradient
        step = (learning_rate / scale) * moment / (ops.sqrt(second) + self.epsilon)
        if decay is not None:
            step = step + learning_rate * self.reliability.lessened(ops, decay, shard)
        state = {
            **shard,
            "reserve": kept * reserve + self.beta_1 * gradient,
            "second_moment": second,
            "reserve_bias": kept * bias + self.beta_1,
            "scale": scale,
            "step_square": self.reliability.step_square(ops, shard, step),
        }
        return Advance(weights - step, state)

    def scale(self, ops: ArrayOps, kept: Array, bias: Array, updates: Array) -> Array:
        """Return b / sqrt(1 - b2^n) of the update after ``updates`` others, 0-d."""
        unbias = ops.sqrt(1.0 - ops.power(scalar(ops, updates, self.beta_2), updates + 1.0))
        return ((1.0 - kept) * bias + (1.0 - self.beta_1)) / unbias

    def reply(
        self,
        ops: ArrayOps,
        weights: Array,
        learning_rate: Array,
        staleness: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Array:
        """Look ahead by the reserve's release in this worker's next ``tau`` updates, and by its share of decay."""
        kept = kept_impulse(ops, self.beta_1, shard)
        released = 1.0 - ops.power(kept, staleness)
        denominator = ops.sqrt(shard["second_moment"]) + self.epsilon
        ahead = weights - (learning_rate * released / shard["scale"]) * shard["reserve"] / denominator
        if decay is None:
            return ahead
        expected = self.beta_1 * learning_rate * updates_ahead(ops, kept, staleness)
        return ahead - expected * self.reliability.lessened(ops, decay, shard)

    def enter(self, ops: ArrayOps, slots: RuleState, updates: Array, shard: RuleState) -> RuleState:
        """Convert ``m`` and ``v`` after ``updates`` updates to G, v, W and the scale."""
        if "m" not in slots:
            return shard
        ratio = self.beta_1 / (1.0 - self.beta_1)
        taken = 1.0 - ops.power(scalar(ops, updates, self.beta_1), updates)
        unbias = ops.sqrt(1.0 - ops.power(scalar(ops, updates, self.beta_2), updates))
        started = updates > 0.0
        one = scalar(ops, updates, 1.0)
        return {
            **shard,
            "reserve": ratio * slots["m"],
            "second_moment": slots["v"],
            "reserve_bias": ratio * taken,
            "scale": ops.where(started, taken, one) / ops.where(started, unbias, one),
        }

    def leave(self, ops: ArrayOps, shard: RuleState) -> RuleState:
        """Convert G and v to Keras' ``m`` and ``v``."""
        return {"m": shard["reserve"] * ((1.0 - self.beta_1) / self.beta_1), "v": shard["second_moment"]}
