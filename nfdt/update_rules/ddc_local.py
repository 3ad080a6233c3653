"""DDC-ASGD for workers that push the difference of several steps of their own: trust by drift, and a reserve.

A worker was sent ``h``, made steps with the user's optimizer, and pushes ``D = h - own``. In each block of elements,
with ``d = w - h`` and M workers::

    c = clip(dc_lambda <D, d> / (|D| sqrt(s)), -dc_clip, +dc_clip)
    u = f D,  f = (1 + c) / (1 + gap |d| / (sqrt(s) + |w| / 30)),  gap = 2
    R = R + (1 - 1/M) u;   g = R / (kappa M);   R = R - g;   w = w - (u + g)
    s = b s + (1 - b) |u + g|^2,   b = min(.9, n / (n + 1)),   n = updates before

Workers that differ in their data move the weights in the same direction only in part, so that a mean of their
differences moves too little. The reserve R returns what most of them agree on over ``kappa`` rounds of M pushes; what
they disagree on cancels in it. A worker is sent ``h = w - phi R``, ``phi = 1 - (1 - 1/(kappa M))^M``: the weights after
the next round's releases.

With one worker d and R are 0, and ``w = own``: training is that of one process.
"""

from __future__ import annotations

from nfdt.update_rules.base import Advance, Array, ArrayOps, Correction, Push, RuleState, UpdateRule, scalar
from nfdt.update_rules.reliability import Reliability

RELEASE_ROUNDS = 10  # kappa
STEP_DECAY = 0.9


class DelayedDifference(UpdateRule):
    """DDC-ASGD of differences. See the module's docstring.

    Args:
        workers: Number of workers, M >= 1.
        reliability: Compensation and trust of a difference.
    """

    name = "ddc"
    owns_optimizer = True
    uses_backup = True

    def __init__(self, workers: int, reliability: Reliability) -> None:
        self.reliability, self.blocks = reliability, reliability.blocks
        self.held_back = 1.0 - 1.0 / workers
        self.released = 1.0 / (RELEASE_ROUNDS * workers)
        self.ahead = 1.0 - (1.0 - self.released) ** workers
        self.looks_ahead = workers > 1

    def init_shard(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return s (``step_square``), one number for each block, and R (``reserve``), shape ``(n,)``; all zero."""
        zeros = ops.zeros_like(weights)
        return {"step_square": ops.zeros_like(self.blocks.sums(ops, weights)), "reserve": zeros}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return ``u``, the difference weighted by its drift, at the full learning rate."""
        trusted = self.blocks.scaled(ops, push.gradient, self.reliability.factor(ops, push, shard))
        return Correction(trusted, scalar(ops, push.staleness, 1.0), shard, worker)

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
        """Apply ``u`` and a share of the reserve; the user's optimizer has decayed the weights already."""
        moved = learning_rate * gradient
        reserve = shard["reserve"] + self.held_back * moved
        step = moved + self.released * reserve
        kept = ops.minimum(scalar(ops, updates, STEP_DECAY), updates / (updates + 1.0))
        square = kept * shard["step_square"] + (1.0 - kept) * self.blocks.sums(ops, step * step)
        return Advance(weights - step, {"step_square": square, "reserve": reserve - self.released * reserve})

    def reply(
        self,
        ops: ArrayOps,
        weights: Array,
        learning_rate: Array,
        staleness: Array,
        shard: RuleState,
        decay: Array | None = None,
    ) -> Array:
        """Look ahead by what the reserve releases in the next round."""
        return weights - self.ahead * shard["reserve"]


class MeanDifference(UpdateRule):
    """Asynchronous average of the workers: each difference moves the weights by its share, ``w - D / M``.

    Args:
        workers: Number of workers, M >= 1.
    """

    name = "plain"

    def __init__(self, workers: int) -> None:
        self.share = 1.0 / workers

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return the worker's share of the difference."""
        return Correction(self.share * push.gradient, scalar(ops, push.staleness, 1.0), shard, worker)
