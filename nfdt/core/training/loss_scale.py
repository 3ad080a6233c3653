"""Loss scaling on a worker, as in Keras' optimizers: a fixed factor, or a dynamic one for float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


class LossScale:
    """Scales a loss and unscales its gradient.

    The dynamic scale halves after a gradient that is not finite and doubles after ``dynamic_growth_steps`` finite ones,
    as in ``keras.optimizers.LossScaleOptimizer``.

    Args:
        factor: A fixed factor, or None.
        dynamic: ``{"initial_scale", "dynamic_growth_steps"}``, or None for no dynamic scaling.
    """

    def __init__(self, factor: float | None, dynamic: Mapping[str, Any] | None) -> None:
        self._factor = factor
        self._growth_steps = int(dynamic["dynamic_growth_steps"]) if dynamic else 0
        self._scale = tf.Variable(float(dynamic["initial_scale"]), trainable=False) if dynamic else None
        self._finite_steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def value(self) -> float:
        """Scale of the next step."""
        return float(self._scale) if self._scale is not None else self._factor or 1.0

    def scaled(self, loss: Any) -> Any:
        """Return ``loss`` times the scale."""
        if self._scale is not None:
            return loss * tf.cast(self._scale, loss.dtype)
        return loss * self._factor if self._factor is not None else loss

    def unscaled(self, gradient: Any) -> tuple[Any, Any]:
        """Return the unscaled gradient, and whether it is finite (always True without dynamic scaling)."""
        if self._scale is None:
            return gradient / self._factor if self._factor is not None else gradient, tf.constant(True)
        scale = self._scale.read_value()
        finite = tf.reduce_all(tf.math.is_finite(gradient))
        grows = tf.logical_and(finite, tf.equal(self._finite_steps, self._growth_steps - 1))
        counts_on = tf.logical_and(finite, tf.logical_not(grows))
        self._scale.assign(scale * tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5))
        self._finite_steps.assign(tf.where(counts_on, self._finite_steps + 1, tf.zeros_like(self._finite_steps)))
        return gradient / scale, finite
