"""The metrics of a Keras model, and those among them that define their own merge."""

from __future__ import annotations

from typing import Any


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
