"""Reduction of the gradients of all ranks except those of local variables, which each rank keeps for itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hfdt.keras.reduction import Reduction
from nfdt.core.errors import UsageError


class LocalVariables:
    """Set of variables by identity. A layer in it stands for the variables that it has when the set is read."""

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._layers: list[Any] = []

    def add_variables(self, given: Any) -> None:
        """Add one variable or several.

        Raises:
            UsageError: something else is among them.
        """
        self._variables += _members(given, (keras.Variable, tf.Variable), "local variables", "Keras variables")

    def add_layers(self, given: Any) -> None:
        """Add one layer or several; they need not be built.

        Raises:
            UsageError: something else is among them.
        """
        self._layers += _members(given, keras.Layer, "local_layers", "Keras layers")

    def __bool__(self) -> bool:
        return bool(self._variables or self._layers)

    def __contains__(self, variable: Any) -> bool:
        layers = [found for layer in self._layers for found in layer.variables]
        return any(variable is found for found in [*self._variables, *layers])


def _members(given: Any, kind: Any, name: str, expected: str) -> list[Any]:
    if given is None or isinstance(given, kind):
        found = [] if given is None else [given]
    else:
        found = list(given) if isinstance(given, Iterable) else [given]
    wrong = [member for member in found if not isinstance(member, kind)]
    if wrong:
        raise UsageError(f"Expected {name} to be {expected}. Received: {wrong[0]!r}. Leave it out.")
    return found


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
