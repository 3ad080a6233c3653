"""Base of the optimizers that replace a model's own while a worker computes gradients."""

from __future__ import annotations

from typing import Any

import keras

from nfdt.core.errors import CaptureError
from nfdt.core.keras_internals import raw_learning_rate


class ReplacingOptimizer(keras.optimizers.Optimizer):
    """An optimizer that changes no variable.

    Attributes that it lacks (``momentum``, ``get_config``, ...) are read from the optimizer that it replaces.

    Args:
        replaced: The model's optimizer.
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__(learning_rate=0.0, name="recording_optimizer")
        self._replaced = replaced
        self.iterations.assign(replaced.iterations)
        self.built = True

    def __getattr__(self, name: str) -> Any:
        replaced = vars(self).get("_replaced")
        if replaced is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(replaced, name)

    @property
    def learning_rate(self) -> Any:
        """Rate of the replaced optimizer; a schedule is evaluated at this step's iterations."""
        inner = getattr(self._replaced, "inner_optimizer", self._replaced)
        rate = raw_learning_rate(inner)
        # Keras evaluates a schedule at the replaced optimizer's own counter, which does not advance here.
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(self.iterations)
        return inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        raise CaptureError(
            "train_step() sets optimizer.learning_rate: the rate belongs to the parameter server while the job runs. "
            "Use a learning-rate schedule, or a callback."
        )


def replace_everywhere(model: Any, replacement: ReplacingOptimizer) -> None:
    """Replace every reference of the model to its optimizer."""
    replaced = model.optimizer
    for name, value in list(vars(model).items()):
        if value is replaced:
            setattr(model, name, replacement)


def not_of_the_model(variable: Any) -> CaptureError:
    """Return the error of a step that updates a variable that does not belong to its model."""
    return CaptureError(
        f"train_step() updates {getattr(variable, 'path', variable.name)!r}, which is not one of the model's trainable "
        "variables. Assign the layer that owns it to an attribute of the model before compile()."
    )
