"""Update rules of gradients to compare with: they are for SGD, and keep the order of its steps."""

from __future__ import annotations

from nfdt.update_rules.base import Advance, Array, ArrayOps, Correction, Push, RuleState, UpdateRule, initial, scalar
from nfdt.update_rules.dc import compensation, mean_square
from nfdt.update_rules.reliability import STEP_DECAY, STEP_EPSILON, count_push, kept_impulse


class ElementwiseDelayed(UpdateRule):
    """DDC-ASGD as it was before it judged gradients by blocks: every element by itself.

    With g the gradient, d = w - backup its drift, tau its delay, mu the momentum and lr the learning rate::

        q    = .95 q + .05 g*g
        c    = clip(30 / sqrt(q + 1e-7) * g*g*d, -|g|, |g|)
        gc   = (g + c) / (1 + .5 |d| / (sqrt(s) + 1e-10))
        m    = mu^(1 / (1 + tbar))                                 tbar: mean delay
        dw   = (1 - m) R + lr gc;    R = m R + lr mu / (1 - mu) gc;    w = w - dw - lr decay w
        s    = .99 s + .01 dw*dw
        the worker gets  w - (1 - m^tau) R

    References:
        docs/decisions/0016-delayed-gradients-are-judged-by-blocks.md, "elementwise, as it was".
    """

    name = "ddc-elementwise"
    owns_optimizer = looks_ahead = uses_backup = True
    dc_lambda, gap, square_decay, epsilon = 30.0, 0.5, 0.95, 1e-7

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return q, s and R, shape ``(n,)``, zero, and the scalars of the mean delay."""
        vectors = {name: ops.zeros_like(weights) for name in ("mean_square", "step_square", "reserve")}
        return {**vectors, "mean_delay": initial(weights), "seen": initial(weights)}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return gc."""
        square = mean_square(shard["mean_square"], push.gradient, self.square_decay)
        bound = ops.abs(push.gradient)
        change = compensation(push, self.dc_lambda / ops.sqrt(square + self.epsilon))
        change = ops.minimum(ops.maximum(change, -bound), bound)
        drift = ops.abs(push.weights - push.backup) / (ops.sqrt(shard["step_square"]) + STEP_EPSILON)
        gradient = (push.gradient + change) / (1.0 + self.gap * drift)
        state = {**count_push(ops, shard, push.staleness), "mean_square": square}
        return Correction(gradient, scalar(ops, push.staleness, 1.0), state, worker)

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
        """Release a share of R together with the gradient; put the gradient's impulse into R."""
        kept, scaled = kept_impulse(ops, self.momentum, shard), learning_rate * gradient
        step = (1.0 - kept) * shard["reserve"] + scaled
        reserve = kept * shard["reserve"] + self.momentum / (1.0 - self.momentum) * scaled
        square = STEP_DECAY * shard["step_square"] + (1.0 - STEP_DECAY) * step * step
        decayed = weights if decay is None else weights - learning_rate * decay
        return Advance(decayed - step, {**shard, "reserve": reserve, "step_square": square})

    def reply(
        self,
        ops: ArrayOps,
        weights: Array,
        learning_rate: Array,
        staleness: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Array:
        """Return the weights less what R releases in this worker's next tau updates."""
        kept = kept_impulse(ops, self.momentum, shard)
        return weights - (1.0 - ops.power(kept, staleness)) * shard["reserve"]

    def leave(self, ops: ArrayOps, shard: RuleState) -> RuleState:
        """Return Keras' velocity, ``-R (1 - mu) / mu``; no slot without momentum."""
        if not self.momentum:
            return {}
        return {"momentum": shard["reserve"] * (-(1.0 - self.momentum) / self.momentum)}


class DanaDelayCompensated(UpdateRule):
    """DANA-DC: a momentum for each worker, weights ahead by the sum of all momenta, compensated gradients.

    With g the gradient of worker i, h_i the weights that were sent to it, mu the momentum, lr the learning rate::

        gc  = g + 2 g*g (w - h_i)
        v_i = mu v_i + gc
        w   = w - lr v_i - lr decay w
        the worker gets  w - lr mu sum_j v_j

    One worker without compensation is Nesterov's method. The momentum of a lost worker stays in the sum.

    References:
        Hakimi, Barkai, Gabel and Schuster, "Taming Momentum in a Distributed Asynchronous Environment",
        arXiv:1907.11612: DANA-Zero and DANA-DC; lambda = 2.
    """

    name = "dana-dc"
    owns_optimizer = looks_ahead = uses_backup = True

    def __init__(self, momentum: float, dc_lambda: float = 2.0) -> None:
        self.momentum, self.dc_lambda = momentum, dc_lambda

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return the sum of the momenta, shape ``(n,)``, zero."""
        return {"sum": ops.zeros_like(weights)}

    def init_worker(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return v_i, shape ``(n,)``, zero."""
        return {"velocity": ops.zeros_like(weights)}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return v_i with the compensated gradient, at the full learning rate."""
        before = worker["velocity"]
        velocity = self.momentum * before + push.gradient + compensation(push, self.dc_lambda)
        total = {"sum": shard["sum"] + velocity - before}
        return Correction(velocity, scalar(ops, push.staleness, 1.0), total, {"velocity": velocity})

    def reply(
        self,
        ops: ArrayOps,
        weights: Array,
        learning_rate: Array,
        staleness: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Array:
        """Return the weights that one more step of every worker's momentum would give."""
        return weights - learning_rate * self.momentum * shard["sum"]

    def leave(self, ops: ArrayOps, shard: RuleState) -> RuleState:
        """Return the sum as Keras' velocity, without the learning rate; no slot without momentum."""
        return {"momentum": -shard["sum"]} if self.momentum else {}
