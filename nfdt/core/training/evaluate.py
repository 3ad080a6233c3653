"""The user's own ``test_step`` and ``predict_step`` as functions of weights and batch."""

from __future__ import annotations

from typing import Any

import keras

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.training.flat_weights import WeightSetter
from nfdt.core.training.gradient_step import direct_call, step_logs


class EvaluateStep:
    """One evaluation step of a model, traced once per batch signature; it updates the model's metrics as in Keras.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        self._model = model
        self._weights = WeightSetter(model, layout)
        self._run = direct_call(self._traced, model)

    def __call__(self, weights: Any, batch: Any) -> dict[str, Any]:
        """Evaluate one batch.

        Args:
            weights: Flat weights, shape ``(P,)``, float32; copied.
            batch: Argument of ``test_step``.

        Returns:
            Logs that ``test_step`` returned: name -> 0-d float32 tensor, or an array.
        """
        return dict(self._run(weights, self._run.prepare(batch)))

    def _traced(self, weights: Any, batch: Any) -> dict[str, Any]:
        self._weights(weights)
        return step_logs(self._model.test_step(batch), "test_step")


class OutputStep:
    """One prediction step of a model, traced once per batch signature.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        self._model = model
        self._weights = WeightSetter(model, layout)
        self._run = direct_call(self._traced, model)

    def __call__(self, weights: Any, batch: Any) -> list[Any]:
        """Return the leaves of what ``predict_step`` returns for flat weights, shape ``(P,)``, and a batch."""
        return list(self._run(weights, self._run.prepare(batch)))

    def _traced(self, weights: Any, batch: Any) -> list[Any]:
        self._weights(weights)
        return list(keras.tree.flatten(self._model.predict_step(batch)))
