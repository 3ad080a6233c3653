"""DC-ASGD: a delayed gradient corrected with a diagonal estimate of the Hessian.

``dc-k`` is DC-ASGDK, the baseline of the DDC-ASGD thesis: compensated gradients in front of naive server momentum.

References:
    Zheng et al., ICML 2017, arXiv:1609.08326. Constant strength (DC-ASGD-c) and adaptive strength
    (DC-ASGD-a); the order of the adaptive form (mean square first) follows the authors' server code.
"""

from __future__ import annotations

from nfdt.update_rules.base import Array, ArrayOps, Correction, Push, RuleState, UpdateRule, scalar

EPSILON = 1e-7


def compensation(push: Push, strength: Array | float) -> Array:
    """Return the first-order change of the gradient over the drift: ``strength * g * g * (w - w_backup)``."""
    return strength * push.gradient * push.gradient * (push.weights - push.backup)


def mean_square(previous: Array, gradient: Array, decay: float) -> Array:
    """Return the exponential mean of the squared gradient: ``decay * previous + (1 - decay) * g * g``."""
    return decay * previous + (1.0 - decay) * gradient * gradient


class DelayCompensated(UpdateRule):
    """DC-ASGD-c: ``g + dc_lambda * g * g * (w - w_backup)``.

    ``dc_lambda = 0`` or ``w == w_backup`` returns ``g`` unchanged. ``dc_lambda`` has the unit
    1/loss, so rescaling the loss rescales it.
    """

    name = "dc"
    uses_backup = True

    def __init__(self, dc_lambda: float) -> None:
        self.dc_lambda = dc_lambda

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Return the compensated gradient, at the full learning rate."""
        gradient = push.gradient + compensation(push, self.dc_lambda)
        return Correction(gradient, scalar(ops, push.staleness, 1.0), shard, worker)


class AdaptiveDelayCompensated(UpdateRule):
    """DC-ASGD-a: the strength is ``dc_lambda / sqrt(MS + 1e-7)``, elementwise; one MS per worker."""

    name = "dc-a"
    uses_backup = True

    def __init__(self, dc_lambda: float, decay: float) -> None:
        self.dc_lambda = dc_lambda
        self.decay = decay

    def init_worker(self, ops: ArrayOps, weights: Array) -> RuleState:
        """Return ``mean_square`` of this worker's gradients, shape ``(n,)``, zero."""
        return {"mean_square": ops.zeros_like(weights)}

    def correct(self, ops: ArrayOps, push: Push, shard: RuleState, worker: RuleState) -> Correction:
        """Update the worker's mean square with ``g``, then compensate with it."""
        square = mean_square(worker["mean_square"], push.gradient, self.decay)
        gradient = push.gradient + compensation(push, self.dc_lambda / ops.sqrt(square + EPSILON))
        return Correction(gradient, scalar(ops, push.staleness, 1.0), shard, {**worker, "mean_square": square})


class DelayCompensatedMomentum(UpdateRule):
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
