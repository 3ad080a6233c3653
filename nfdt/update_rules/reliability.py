"""What all forms of DDC-ASGD share: measured delay, bounded compensation, trust by drift."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.update_rules.base import Array, ArrayOps, Push, State, initial, scalar
from nfdt.update_rules.dc import compensation, mean_square

CURVATURE_EPSILON = 1e-7
STEP_EPSILON = 1e-10
STEP_DECAY = 0.99
QUICK_DELAY_DECAY = 0.9
SLOW_DELAY_DECAY = 0.99
QUICK_UPDATES = 50


@dataclass(frozen=True)
class Strengths:
    """``dc_lambda`` (lam0), ``dc_clip`` (kappa), ``gap`` (k) and ``dc_decay`` of algorithms 5.1, all >= 0."""

    dc_lambda: float = 30.0
    dc_clip: float = 1.0
    gap: float = 0.5
    dc_decay: float = 0.95


def init_reliability(ops: ArrayOps, weights: Array) -> State:
    """Vectors q (``mean_square``) and s (``step_square``), scalars ``mean_delay`` (tbar) and ``seen``."""
    return {
        "mean_square": ops.zeros_like(weights),
        "step_square": ops.zeros_like(weights),
        "mean_delay": initial(weights),
        "seen": initial(weights),
    }


def reliable_gradient(ops: ArrayOps, push: Push, shard: State, strengths: Strengths) -> tuple[Array, State]:
    """The gradient compensated for its drift and trusted according to it.

    Computes, elementwise, with ``d = w - backup``::

        q  = dc_decay q + (1 - dc_decay) g*g
        c  = clip(dc_lambda / sqrt(q + 1e-7) * g*g*d, -dc_clip |g|, +dc_clip |g|)
        gc = (g + c) / (1 + gap |d| / (sqrt(s) + 1e-10))

    ``d = 0`` gives ``gc = g``; always ``|gc| <= (1 + dc_clip) |g|``.

    Returns:
        ``gc``, and the shard state with q, the mean delay and the counter moved on.
    """
    square = mean_square(shard["mean_square"], push.gradient, strengths.dc_decay)
    bound = strengths.dc_clip * ops.abs(push.gradient)
    change = compensation(push, strengths.dc_lambda / ops.sqrt(square + CURVATURE_EPSILON))
    change = ops.minimum(ops.maximum(change, -bound), bound)
    drift = ops.abs(push.weights - push.backup) / (ops.sqrt(shard["step_square"]) + STEP_EPSILON)
    gradient = (push.gradient + change) / (1.0 + strengths.gap * drift)
    delay = mean_delay(ops, shard["mean_delay"], push.staleness, shard["seen"])
    return gradient, {**shard, "mean_square": square, "mean_delay": delay, "seen": shard["seen"] + 1.0}


def mean_delay(ops: ArrayOps, previous: Array, staleness: Array, seen: Array) -> Array:
    """tbar: the first push's delay, then a mean with decay .9 for pushes 1..49 and .99 after them."""
    quick, slow = scalar(ops, seen, QUICK_DELAY_DECAY), scalar(ops, seen, SLOW_DELAY_DECAY)
    decay = ops.where(seen < QUICK_UPDATES, quick, slow)
    return ops.where(seen < 1.0, staleness, decay * previous + (1.0 - decay) * staleness)


def kept_impulse(ops: ArrayOps, momentum: float, shard: State) -> Array:
    """The share of the reserve kept per update, m = ``momentum ** (1 / (1 + tbar))``, 0-d: slower with delay."""
    delay = shard["mean_delay"]
    return ops.power(scalar(ops, delay, momentum), 1.0 / (1.0 + delay))


def step_square(shard: State, step: Array) -> Array:
    """s: exponential mean of the squared applied steps."""
    return STEP_DECAY * shard["step_square"] + (1.0 - STEP_DECAY) * step * step
