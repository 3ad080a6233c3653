"""What a synchronous step of a rank has on every backend: the model, the user's optimizer, and their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ShapeMismatch, UsageError
from nfdt.model.backends.contract import own_loss_scale
from nfdt.model.keras_internals import training as keras_training
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.optimizer import inner_optimizer
from nfdt.model.program.state import State


class RankStep(ABC):
    """Model and optimizer on one rank; weights stay equal on all ranks because all apply the same updates.

    Args:
        model: A compiled, built model; its optimizer is replaced by a recording one.
        manifest: Program of the model.
        state: Initial state.

    Attributes:
        layout: Layout of the trainable variables.
        optimizer: The user's optimizer, without its loss scale, which the recording one removes.
    """

    def __init__(self, model: Any, manifest: Manifest, state: State) -> None:
        self._model, self.layout = model, manifest.layout
        self._variables = list(model.trainable_variables)
        self.optimizer = inner_optimizer(model)
        self._replace_optimizer(model, manifest.loss_scale or own_loss_scale(model.optimizer))
        self.optimizer.loss_scale_factor = None
        self.optimizer.build(self._variables)
        if self.optimizer.weight_decay and not all(manifest.decay or ()):
            # The optimizer's configuration, from which it was made, lacks exclude_from_weight_decay().
            keras_training.set_weight_decay_use(self.optimizer, self._variables, manifest.decay or ())
        self.load(State(state.weights, state.optimizer))

    @abstractmethod
    def _replace_optimizer(self, model: Any, loss_scale: Mapping[str, Any] | None) -> None:
        """Replace the model's optimizer by one that records gradients."""

    @abstractmethod
    def prepare(self, batch: Any) -> Any:
        """Convert a pytree of arrays to the tensors that the step needs, ahead of the call."""

    @abstractmethod
    def __call__(self, batch: Any, weight: float, pause: Callable[[float], None] | None = None) -> Mapping[str, Any]:
        """Train on this rank's part of a global batch; collective.

        Args:
            batch: A pytree of arrays, or a prepared one; None for a rank without rows.
            weight: Fraction of the global batch in this part.
            pause: Called with the time of the gradient in seconds, before it is reduced, to emulate a slower rank.

        Returns:
            The logs of ``train_step`` on this rank; empty without rows.
        """

    @abstractmethod
    def set_factor(self, value: float) -> None:
        """Multiply the learning rate by this factor from the next step on."""

    @property
    def learning_rate(self) -> float | None:
        """Rate of the next update, with the factor of the ring; None: the optimizer has none of its own."""
        if keras_training.raw_learning_rate(self.optimizer) is None:
            return None
        return float(self.optimizer.learning_rate)

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate.

        Raises:
            UsageError: the optimizer follows a schedule.
        """
        if not keras_training.has_fixed_learning_rate(self.optimizer):
            raise UsageError(
                f"Learning rate: expected a plain number in the optimizer to replace by {value}. Received: a schedule."
            )
        self.optimizer.learning_rate = value

    def weights(self) -> Array:
        """Return a copy of the trainable variables, flat, float32."""
        return self.layout.flatten([np.asarray(v.value) for v in self._variables])

    def read(self) -> State:
        """Return a copy of weights and optimizer variables."""
        variables = {i: np.array(v.value) for i, v in enumerate(self.optimizer.variables)}
        return State(self.weights(), optimizer=variables)

    def load(self, state: State) -> None:
        """Replace the weights and, where given, the optimizer variables.

        Raises:
            ShapeMismatch: the state belongs to another model.
        """
        for variable, value in zip(self._variables, self.layout.unflatten(state.weights), strict=True):
            variable.assign(value)
        own = self.optimizer.variables
        for index, value in state.optimizer.items():
            if index >= len(own) or tuple(own[index].shape) != np.shape(value):
                raise ShapeMismatch(
                    f"Optimizer variable {index}: expected one of {len(own)} of the program's shapes. Received: shape "
                    f"{np.shape(value)}. The state belongs to another program."
                )
            own[index].assign(value)


def scale_learning_rate(optimizer: Any, scaled: Callable[[Any], Any]) -> None:
    """Let an optimizer use a function of its learning rate whenever it reads the rate during a step."""
    plain = keras_training.learning_rate_method(optimizer)
    keras_training.replace_learning_rate_method(optimizer, lambda: scaled(plain()))
