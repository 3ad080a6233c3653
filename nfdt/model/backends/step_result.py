"""Results of the steps of a model, on every backend of Keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import CaptureError, ShapeMismatch


@dataclass(frozen=True)
class GradientResult:
    """Result of one step.

    Attributes:
        gradient: Gradient of the loss, flat, shape ``(P,)``, float32, a tensor; a ``RowVector`` of a step with tables.
        logs: Logs that ``train_step`` returned: name -> 0-d float32 tensor, or an array.
        finite: False where a float16 gradient overflowed: the gradient must not be pushed.
        denominator: Denominator of the loss: None for the number of samples, ``SUM``, or a 0-d float32 tensor; see
            :mod:`nfdt.model.backends.denominator`.
    """

    gradient: Any
    logs: dict[str, Any]
    finite: bool
    denominator: Any = None


def own_loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """Return the loss scaling of the optimizer itself, in the form of the program's ``loss_scale``, or None."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return {"initial_scale": optimizer.initial_scale, "dynamic_growth_steps": optimizer.dynamic_growth_steps}


def flat_logs(logs: Any, method: str, convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a step's logs, nested dictionaries flattened as in Keras, each value converted.

    Raises:
        CaptureError: the logs are not a dictionary.
    """
    if not isinstance(logs, Mapping):
        raise CaptureError(
            f"{method}() must return a dictionary of logs, as in {{'loss': ...}}. Received: {type(logs).__name__}."
        )
    found: dict[str, Any] = {}
    for name, value in logs.items():
        nested = isinstance(value, Mapping)
        found.update(flat_logs(value, method, convert) if nested else {str(name): convert(str(name), value)})
    return found


def check_layout(model: Any, layout: ParameterLayout) -> None:
    """Check that the model has the trainable variables of the layout.

    Raises:
        ShapeMismatch: it has others.
    """
    shapes = [tuple(int(n) for n in v.shape) for v in model.trainable_variables]
    if shapes != [slot.shape for slot in layout.slots]:
        raise ShapeMismatch(
            f"Expected a model with {len(layout.slots)} trainable variables of the program's shapes. "
            f"Received: {len(shapes)}: {shapes[:8]}."
        )
