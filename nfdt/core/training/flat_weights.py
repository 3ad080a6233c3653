"""A model's trainable variables as one flat vector, inside a traced function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.training.step_result import check_layout


class WeightSetter:
    """Assigns a flat vector to the trainable variables.

    Args:
        model: A built model.
        layout: Layout of its trainable variables.
        tables: Indices of variables that are not part of the vector.

    Raises:
        ShapeMismatch: the model has other trainable variables than the layout.
    """

    def __init__(self, model: Any, layout: ParameterLayout, tables: Sequence[int] = ()) -> None:
        check_layout(model, layout)
        self._variables = [v for i, v in enumerate(model.trainable_variables) if i not in tables]
        self._layout = layout.without(tables)

    def __call__(self, weights: Any) -> None:
        """Assign ``weights``, shape ``(P,)``, float32."""
        weights = tf.ensure_shape(weights, [self._layout.size])
        for variable, slot in zip(self._variables, self._layout.slots, strict=True):
            # One slice and one assignment per variable, all of them nodes of the step's graph.
            part = tf.reshape(weights[slot.start : slot.stop], slot.shape)
            variable.value.assign(tf.cast(part, variable.value.dtype))

    def read(self) -> Any:
        """Return the current weights, shape ``(P,)``, float32."""
        parts = [tf.reshape(tf.cast(variable.value, tf.float32), [-1]) for variable in self._variables]
        return tf.concat(parts, 0) if parts else tf.zeros(0)
