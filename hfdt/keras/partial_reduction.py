"""Reduction of the gradients of all ranks except those of local variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hfdt.keras.local_variables import LocalVariables
from hfdt.keras.reduction import Reduction
from nfdt.core.errors import UsageError


class PartialReduction:
    """Reduction that leaves the gradients of local variables on their rank.

    Args:
        reduction: Reduction of the other gradients.
        scale: Divide gradients of local variables by the number of ranks.

    Attributes:
        local: The local variables.
    """

    def __init__(self, reduction: Reduction, *, scale: bool) -> None:
        self._reduction = reduction
        self._scale = scale
        self.local = LocalVariables()

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> list[Any]:
        """Return the gradients to apply, in order; None stays None.

        Args:
            gradients: Gradients of this rank.
            variables: The variable of each gradient.
            optimizer: Optimizer that applies them.

        Raises:
            UsageError: the optimizer clips by the norm of common and local gradients together.
        """
        places = [i for i, v in enumerate(variables) if gradients[i] is not None and v in self.local]
        if not places:
            return self._reduction(gradients, variables)
        _check_clipping(getattr(optimizer, "inner_optimizer", optimizer))
        kept = [gradients[i] for i in places]
        shared = [None if i in places else gradient for i, gradient in enumerate(gradients)]
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            *reduced, overflow = self._reduction([*shared, _overflow(kept)], [*variables, None])
            kept = [_with_values(gradient, _values(gradient) + _like(gradient, overflow)) for gradient in kept]
        else:
            reduced = self._reduction(shared, variables)
        if self._scale:
            size = self._reduction.world_size()
            kept = [_with_values(gradient, _values(gradient) / _like(gradient, size)) for gradient in kept]
        for i, gradient in zip(places, kept, strict=True):
            reduced[i] = gradient
        return reduced


def _check_clipping(optimizer: Any) -> None:
    if optimizer.global_clipnorm:
        raise UsageError(
            f"{optimizer.name!r} clips by the norm of all gradients. Those of local variables differ between ranks, "
            "and so would the common weights. Expected: clipnorm or clipvalue. Received: "
            f"global_clipnorm={optimizer.global_clipnorm}."
        )


def _overflow(gradients: Sequence[Any]) -> Any:
    """Return 0, or NaN if a gradient is not finite: reduced, it makes the loss scalers of all ranks skip the step."""
    return tf.add_n([tf.cast(tf.reduce_sum(_values(gradient) * 0), tf.float32) for gradient in gradients])


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)


def _with_values(gradient: Any, values: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


def _like(gradient: Any, number: Any) -> Any:
    return tf.cast(number, gradient.dtype)
