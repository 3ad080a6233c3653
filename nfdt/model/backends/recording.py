"""Optimizers that replace a model's own while a worker computes gradients: they record what ``train_step`` applies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import CaptureError
from nfdt.model.keras_internals.training import raw_learning_rate, variable_key


class StepGradients:
    """The gradients of one step. Not attributes of the optimizer, whose attributes Keras would track.

    Args:
        layout: Position of each variable in the flat vector.

    Attributes:
        layout: See the argument.
        places: Index of each variable in the layout, by the key that Keras gives it.
        recorded: Gradients of this step, by the index of their variable.
    """

    applied_by = "self.optimizer.apply(...)"

    def __init__(self, layout: ParameterLayout) -> None:
        self.layout = layout
        self.places: Mapping[Any, int] = {}
        self.recorded: dict[int, Any] = {}

    def clear(self) -> None:
        """Begin a step."""
        self.recorded.clear()

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Record gradients by the index of their variable.

        Raises:
            CaptureError: one of the variables already has a gradient.
        """
        if twice := self.recorded.keys() & gradients.keys():
            raise CaptureError(
                f"train_step() applies the optimizer twice to {self.layout.slots[min(twice)].name!r}: one step is one "
                "update here. Let every call of train_step() apply one gradient per variable."
            )
        self.recorded.update(gradients)

    def require_any(self) -> None:
        """Raise CaptureError if the step of a model with trainable variables has recorded nothing."""
        if self.layout.slots and not self.recorded:
            raise CaptureError(f"train_step() never calls {self.applied_by}: there is no gradient to send.")


class RecordingOptimizer(keras.optimizers.Optimizer):
    """An optimizer that changes no variable: it records the gradients that ``train_step`` passes to it.

    Attributes that it lacks (``momentum``, ``get_config``, ...) are read from the optimizer that it replaces.

    Args:
        replaced: The model's optimizer.
        variables: The trainable variables, in the layout's order.
        gradients: Where to record.

    Attributes:
        gradients: See the argument.
    """

    def __init__(self, replaced: Any, variables: Sequence[Any], gradients: StepGradients) -> None:
        super().__init__(learning_rate=0.0, name="recording_optimizer")
        self._replaced = replaced
        self.iterations.assign(replaced.iterations)
        self.built = True
        self.gradients = gradients
        gradients.places = {variable_key(self, variable): place for place, variable in enumerate(variables)}

    def begin_step(self, version: Any) -> None:
        """Drop the last step's gradients; ``version`` becomes ``iterations``."""
        self.gradients.clear()
        self.iterations.assign(version)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Record the gradients of these variables for this step.

        Raises:
            ValueError: no variable has a gradient, as in Keras.
            CaptureError: a variable does not belong to the model, or already has a gradient.
        """
        grads = list(grads)
        if not grads:  # a model without trainable variables; Keras counts no update either (decision 44)
            return
        variables = [None] * len(grads) if trainable_variables is None else trainable_variables
        places = [self._place(i, variable) for i, variable in enumerate(variables)]
        found = {place: grad for place, grad in zip(places, grads, strict=True) if grad is not None}
        if not found:
            raise ValueError("No gradients provided for any variable.")
        self.gradients.add(found)
        self.iterations.assign_add(1)

    def _place(self, position: int, variable: Any) -> int:
        """Return the index of a variable in the layout; None is the one of this position."""
        if variable is None:
            return position
        place = self.gradients.places.get(variable_key(self, variable))
        if place is None:
            raise not_of_the_model(variable)
        return place

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


def next_loss_scale(scale: Any, finite_steps: Any, finite: Any, growth_steps: int, where: Any) -> tuple[Any, Any]:
    """Return a dynamic loss scale and its count of finite steps after a step, as ``LossScaleOptimizer`` has them.

    The scale halves after a gradient that is not finite, and doubles after ``growth_steps`` finite ones.

    Args:
        scale: Scale of the step.
        finite_steps: Number of finite gradients since the scale has changed.
        finite: Whether the gradient of the step is finite: a boolean of NumPy, or a tensor.
        growth_steps: Number of finite gradients after which the scale doubles.
        where: ``numpy.where``, or that of the backend.
    """
    grows = finite & (finite_steps == growth_steps - 1)
    return scale * where(finite, where(grows, 2.0, 1.0), 0.5), where(finite & ~grows, finite_steps + 1, 0)


def replace_everywhere(model: Any, replacement: RecordingOptimizer) -> None:
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
