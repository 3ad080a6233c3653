"""Update rules of differences to compare with: for workers that take local steps with any optimizer.

``D`` is what a worker's steps have changed, and M the number of workers.
"""

from __future__ import annotations

from nfdt.core.errors import UsageError
from nfdt.update_rules.base import Array, ArrayOps, Correction, Push, RuleState, UpdateRule, initial, scalar
from nfdt.update_rules.blocks import Blocks, KernelBlocks

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


def tensor_starts(blocks: Blocks) -> list[int]:
    """Return where variables begin; consecutive parts with equally many columns count as one variable."""
    if not isinstance(blocks, KernelBlocks):
        raise UsageError(f"Update rule heloco: expected blocks of kernels. Received: {type(blocks).__name__}.")
    starts, columns = [], 0
    for start, _, _, _, width in blocks.parts:
        if width != columns:
            starts.append(start)
        columns = width
    return starts
