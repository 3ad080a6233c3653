"""What a compiled model trains with, which methods it overrides, and its metrics."""

from __future__ import annotations

from typing import Any

import keras

from nfdt.model.keras_internals.models import compiled_arguments, serialization_lib
from nfdt.model.program.described import describe_value


def describe_compilation(model: Any, *, by_value: bool = False) -> dict[str, Any]:
    """Return the manifest's ``compile``: what the compiled model trains with, whichever call of ``compile`` gave it.

    Args:
        model: A compiled model.
        by_value: Whether the model itself travels, so that a description is enough of all except the optimizer.

    Raises:
        CaptureError: Keras cannot serialise a part of it.
    """
    serialize = serialization_lib.serialize_keras_object
    arguments = compiled_arguments(model)
    described = describe_value(arguments) if by_value else serialize(arguments)
    return {**described, "optimizer": serialize(model.optimizer)}


def overrides(model: Any, method: str) -> bool:
    """Return whether the user's class replaces a method of ``keras.Model``, or the script that of this model."""
    return getattr(type(model), method) is not getattr(keras.Model, method) or method in vars(model)


def leaf_metrics(model: Any) -> list[Any]:
    """Return the metrics that hold the variables in ``model.metrics_variables``, in that order."""
    found: list[Any] = []
    for metric in model.metrics:
        hides_others = type(metric).__name__ == "CompileMetrics"  # Keras' container for the metrics of compile()
        found.extend(metric.metrics if hides_others else [metric])
    return found


def merges_itself(metric: Any) -> bool:
    """Return whether a metric can merge the state of others of its class: ``merge_state(self, metrics)``."""
    return callable(getattr(metric, "merge_state", None))
