"""Update rules to compare with, which are no part of the product.

Those of gradients are for SGD, and keep the order of its steps. Those of differences are for workers that take local
steps with any optimizer; ``D`` is what a worker's steps have changed, and M the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nfdt.core.errors import UsageError
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.presets import AXES, RULE_FACTS, RuleFacts
from nfdt.update_rules import DIFFERENCE_RULES, RULES
from nfdt.update_rules.base import (
    Advance,
    Array,
    ArrayOps,
    Correction,
    OptimizerTraits,
    Push,
    RuleState,
    UpdateRule,
    initial,
    scalar,
)
from nfdt.update_rules.blocks import Blocks, KernelBlocks
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


OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


class OuterNesterov(UpdateRule):
    """Nesterov SGD of each difference as it arrives, as DiLoCo has it for their mean.

    With mu = .9::

        v = mu v + D;   w = w - .7 (D + mu v)

    References:
        Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135, section 3.
    """

    name = "local-nesterov"
    owns_optimizer = True

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return v, shape ``(n,)``, zero."""
        return {"velocity": ops.zeros_like(weights)}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return what a difference moves the weights by."""
        velocity = OUTER_MOMENTUM * shard["velocity"] + push.gradient
        moved = OUTER_RATE * (push.gradient + OUTER_MOMENTUM * velocity)
        return Correction(moved, scalar(ops, push.staleness, 1.0), {"velocity": velocity}, worker)


class DelayedNesterov(OuterNesterov):
    """Delayed Nesterov with c = 0: momentum once in a round of M differences, each of which moves the weights by 1/M.

    With S the sum of the round's differences and mu = .9::

        v = mu v + S / M          at the end of the round
        w = w - .7 (D / M + mu v) at the end of the round, else w - .7 D / M

    References:
        Liu et al., arXiv:2401.09135, algorithm 3. Its dynamic local updates are NFDT's numbers of steps by speed.
    """

    name = "delayed-nesterov"

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return v and S, shape ``(n,)``, zero, and the number of differences in S."""
        zeros = ops.zeros_like(weights)
        return {**super().init_shard(ops, weights), "sum": zeros, "seen": initial(weights)}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return what a difference moves the weights by, with the momentum if it ends a round."""
        total, seen = shard["sum"] + push.gradient, shard["seen"] + 1.0
        ends, zeros = seen >= self.workers, ops.zeros_like(total)
        velocity = ops.where(ends, OUTER_MOMENTUM * shard["velocity"] + total / self.workers, shard["velocity"])
        moved = OUTER_RATE * (push.gradient / self.workers + ops.where(ends, OUTER_MOMENTUM * velocity, zeros))
        state = {
            "velocity": velocity,
            "sum": ops.where(ends, zeros, total),
            "seen": ops.where(ends, ops.zeros_like(seen), seen),
        }
        return Correction(moved, scalar(ops, push.staleness, 1.0), state, worker)


class MomentumLookAhead(OuterNesterov):
    """Momentum look-ahead: a worker begins where the momentum would take the weights.

    With mu = .9 and ``u = D / sqrt(M)``::

        v = mu v + (1 - mu) u;   w = w - .7 (u + mu v)
        the worker gets  w - .7 mu v

    References:
        Ajanthan et al., "Momentum Look-Ahead for Asynchronous Distributed Low-Communication Training", MCDC at
        ICLR 2025; as in arXiv:2606.00271, equations 5, 18 and 19, with that paper's weight of an arrival.
    """

    name = "momentum-look-ahead"
    looks_ahead = True

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return what u moves the weights by."""
        arrived = self._arrived(ops, push.gradient, shard["velocity"]) / self.workers**0.5
        velocity = OUTER_MOMENTUM * shard["velocity"] + (1.0 - OUTER_MOMENTUM) * arrived
        moved = OUTER_RATE * (arrived + OUTER_MOMENTUM * velocity)
        return Correction(moved, scalar(ops, push.staleness, 1.0), {"velocity": velocity}, worker)

    def _arrived(self, ops: ArrayOps, difference: Array, velocity: Array) -> Array:
        """Return the difference that counts."""
        return difference

    def reply(
        self,
        ops: ArrayOps,
        weights: Array,
        learning_rate: Array,
        staleness: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Array:
        """Return the weights after a step of the momentum alone."""
        return weights - OUTER_RATE * OUTER_MOMENTUM * shard["velocity"]


class DirectionCorrected(MomentumLookAhead):
    """HeLoCo: momentum look-ahead, whose differences are corrected towards the momentum, tensor by tensor.

    With a = |D|, b = |v|, c the cosine of D and v, and ``q = a / (a + 3 b)``::

        c >= .2        D stays
        c < 0          D - min(.5, -.5 c q) c a v/b
        0 <= c < .2    a m/|m|,  m = (1 - l) D/a + l v/b,  l = min(1, (1 - c) q)

    References:
        Al Asif et al., "HeLoCo", arXiv:2606.00271, algorithm 2, with its constants.
    """

    name = "heloco"

    def __init__(self, workers: int, starts: list[int]) -> None:
        super().__init__(workers)
        self.starts = starts

    def _arrived(self, ops: ArrayOps, difference: Array, velocity: Array) -> Array:
        """Return the difference, corrected tensor by tensor."""
        parts = zip(self.starts, [*self.starts[1:], None], strict=True)
        return ops.concatenate([self._corrected(ops, difference[i:j], velocity[i:j]) for i, j in parts])

    @staticmethod
    def _corrected(ops: ArrayOps, difference: Array, velocity: Array) -> Array:
        tiny = scalar(ops, difference[0], 1e-8)
        length = ops.sqrt(ops.sum(difference * difference, 0))
        speed = ops.sqrt(ops.sum(velocity * velocity, 0))
        own, towards = difference / ops.maximum(length, tiny), velocity / ops.maximum(speed, tiny)
        cosine = ops.sum(own * towards, 0)
        trust = length / (length + 3.0 * speed + 1e-8)
        lessened = ops.minimum(scalar(ops, cosine, 0.5), -0.5 * cosine * trust) * cosine * length
        share = ops.minimum(scalar(ops, cosine, 1.0), (1.0 - cosine) * trust)
        mixed = (1.0 - share) * own + share * towards
        turned = length * mixed / ops.maximum(ops.sqrt(ops.sum(mixed * mixed, 0)), tiny)
        changed = ops.where(cosine < 0.0, difference - lessened * towards, turned)
        return ops.where(cosine >= 0.2, difference, ops.where(speed < tiny, difference, changed))


def _tensors(blocks: Blocks) -> list[int]:
    """Return where variables begin; consecutive parts with equally many columns count as one variable."""
    if not isinstance(blocks, KernelBlocks):
        raise UsageError(f"Update rule heloco: expected blocks of kernels. Received: {type(blocks).__name__}.")
    starts, columns = [], 0
    for start, _, _, _, width in blocks.parts:
        if width != columns:
            starts.append(start)
        columns = width
    return starts


REFERENCE_RULES = {rule.name: rule for rule in (ElementwiseDelayed, DanaDelayCompensated)}
REFERENCE_DIFFERENCES: dict[str, Callable[[int, Blocks], UpdateRule]] = {
    OuterNesterov.name: lambda workers, blocks: OuterNesterov(workers),
    DelayedNesterov.name: lambda workers, blocks: DelayedNesterov(workers),
    MomentumLookAhead.name: lambda workers, blocks: MomentumLookAhead(workers),
    DirectionCorrected.name: lambda workers, blocks: DirectionCorrected(workers, _tensors(blocks)),
}


@contextmanager
def reference_rules() -> Iterator[None]:
    """Add the rules of this file to those of the product within the context."""
    choices = AXES["update_rule"]
    AXES["update_rule"] = (*choices, *REFERENCE_RULES, *REFERENCE_DIFFERENCES)
    for name in REFERENCE_RULES:
        RULE_FACTS[name] = RuleFacts()
        RULES[name] = _make
    for name in REFERENCE_DIFFERENCES:
        RULE_FACTS[name] = RuleFacts(differences=True)
        DIFFERENCE_RULES[name] = lambda spec, *parts: REFERENCE_DIFFERENCES[spec.update_rule](*parts)
    try:
        yield
    finally:
        AXES["update_rule"] = choices
        for name in REFERENCE_RULES:
            del RULE_FACTS[name], RULES[name]
        for name in REFERENCE_DIFFERENCES:
            del RULE_FACTS[name], DIFFERENCE_RULES[name]


def _make(spec: AlgorithmSpec, traits: OptimizerTraits, blocks: Blocks) -> UpdateRule:
    if traits.kind != "sgd" or traits.nesterov:
        raise UsageError(
            f"Update rule {spec.update_rule}: expected SGD, with or without momentum. Received: optimizer of kind "
            f"{traits.kind!r}{', Nesterov' if traits.nesterov else ''}. Use update_rule 'ddc' with it."
        )
    return REFERENCE_RULES[spec.update_rule](traits.momentum)
