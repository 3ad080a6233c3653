"""Result of a training step, on every backend of Keras."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class GradientResult:
    """Result of one step.

    Attributes:
        gradient: Mean over the batch, flat, shape ``(P,)``, float32, a tensor; a ``RowVector`` of a step with tables.
        logs: Logs that ``train_step`` returned: name -> 0-d float32 tensor, or an array.
        finite: False where a float16 gradient overflowed: the gradient must not be pushed.
    """

    gradient: Any
    logs: dict[str, Any]
    finite: bool


def own_loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """Return the loss scaling of the optimizer itself, in the form of the program's ``loss_scale``, or None."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return {"initial_scale": optimizer.initial_scale, "dynamic_growth_steps": optimizer.dynamic_growth_steps}


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return those logs of a step that are numbers."""
    return {name: float(value) for name, value in logs.items() if len(value.shape) == 0}
