"""DDC-ASGD for SGD-type optimizers: momentum held in reserve and released according to the delay.

A gradient ``gc`` must move the weights by ``lr * gc / (1 - mu)`` in all. Part of it is applied at
once, the rest goes into the reserve R (in units of displacement, learning rate inside), of which
each update releases ``1 - m``. Heavy ball, and its Nesterov form (derived below)::

    dw = (1 - m) R + lr * gc                  R = m R + lr * mu / (1 - mu) * gc
    dw = (1 - m) R + lr * (1 + mu) * gc       R = m R + lr * mu^2 / (1 - mu) * gc

Keras keeps ``vel = mu * vel - lr * g`` and applies ``w += vel``, or ``w += mu * vel - lr * g`` with
Nesterov. At tau = 0 (m = mu) put R = -mu * vel / (1 - mu), or R = -mu^2 * vel / (1 - mu): both
lines above then are Keras' exactly, and in both cases the total is lr * gc / (1 - mu).

Weight decay is decoupled, taken from the fresh weights, and multiplied with the mean factor of the block's gradients
(see :mod:`nfdt.update_rules.reliability`). Where gradients and decay balance, the reserve keeps releasing the movement
that decay takes back. Therefore the look-ahead includes decay, with the reserve's share of a gradient, mu or mu^2.
Otherwise every gradient would appear to have a drift in its own direction.
"""

from __future__ import annotations

from nfdt.update_rules.base import Advance, Array, ArrayOps, RuleState
from nfdt.update_rules.reliability import Reliability, ReliableRule, kept_impulse, updates_ahead


class DelayedSGD(ReliableRule):
    """DDC-ASGD around SGD, SGD with momentum (0 <= momentum < 1) and Nesterov SGD; algorithms 5.1."""

    owns_optimizer = True
    looks_ahead = True

    at_once: float
    """Share of a scaled gradient that moves the weights at once."""
    later_share: float
    """The reserve's share of a gradient's effect."""
    delivered_later: float
    """Share of a scaled gradient that goes into the reserve."""

    def __init__(self, reliability: Reliability, momentum: float, nesterov: bool = False) -> None:
        super().__init__(reliability)
        self.momentum = momentum
        nesterov = nesterov and momentum > 0
        self.at_once = 1.0 + momentum if nesterov else 1.0
        self.later_share = momentum**2 if nesterov else momentum
        self.delivered_later = self.later_share / (1.0 - momentum)

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return the reliability state and R (``reserve``), shape ``(n,)``, zero."""
        return {**super().init_shard(ops, weights), "reserve": ops.zeros_like(weights)}

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
        """Release a share of the reserve together with the gradient; put the gradient's impulse in reserve."""
        kept = kept_impulse(ops, self.momentum, shard)
        scaled = learning_rate * gradient
        step = (1.0 - kept) * shard["reserve"] + self.at_once * scaled
        if decay is not None:
            step = step + learning_rate * self.reliability.lessened(ops, decay, shard)
        reserve = kept * shard["reserve"] + self.delivered_later * scaled
        square = self.reliability.step_square(ops, shard, step)
        return Advance(weights - step, {**shard, "reserve": reserve, "step_square": square})

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
        kept = kept_impulse(ops, self.momentum, shard)
        ahead = weights - (1.0 - ops.power(kept, staleness)) * shard["reserve"]
        if decay is None:
            return ahead
        expected = self.later_share * learning_rate * updates_ahead(ops, kept, staleness)
        return ahead - expected * self.reliability.lessened(ops, decay, shard)

    def enter(self, ops: ArrayOps, slots: RuleState, updates: Array, shard: RuleState) -> RuleState:
        """Convert ``momentum`` (Keras' velocity) to the reserve."""
        if "momentum" not in slots:
            return shard
        return {**shard, "reserve": -self.delivered_later * slots["momentum"]}

    def leave(self, ops: ArrayOps, shard: RuleState) -> RuleState:
        """Convert the reserve to ``momentum`` (Keras' velocity); return no slot without momentum."""
        if not self.momentum:
            return {}
        return {"momentum": shard["reserve"] / -self.delivered_later}
