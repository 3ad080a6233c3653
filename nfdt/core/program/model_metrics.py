"""Which metrics a Keras model has, and which of them say how they are merged."""

from __future__ import annotations

from typing import Any


def leaf_metrics(model: Any) -> list[Any]:
    """The metrics that hold the variables in ``model.metrics_variables``, in that order."""
    found: list[Any] = []
    for metric in model.metrics:
        hides_others = type(metric).__name__ == "CompileMetrics"  # Keras' own, of what compile() was given
        found.extend(metric.metrics if hides_others else [metric])
    return found


def merges_itself(metric: Any) -> bool:
    """Whether a metric takes over the state of others of its class: ``merge_state(self, metrics)``."""
    return callable(getattr(metric, "merge_state", None))
