"""The user's own ``train_step`` and ``test_step`` on PyTorch as functions of weights and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.backends.contract import as_tensors
from nfdt.core.backends.denominator import SUM, LossDenominator
from nfdt.core.backends.recording import ReplacingOptimizer, replace_everywhere
from nfdt.core.backends.step_result import GradientResult, check_layout, flat_logs, own_loss_scale
from nfdt.core.errors import CaptureError
from nfdt.core.keras_internals import compiles_torch, variable_key


@dataclass(frozen=True)
class PreparedTensors:
    """A batch as tensors, and its number of samples."""

    pytree: Any
    samples: int


class TorchGradientStep:
    """One training step of a model on PyTorch, compiled where the model asks for it.

    The model's optimizer is permanently replaced by one that records gradients. The step updates weights, metrics,
    BatchNorm statistics and seeds of the model as in Keras.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
        loss_scale: The program's ``loss_scale``; None takes it from the model's own LossScaleOptimizer.
    """

    traces = 0

    def __init__(self, model: Any, layout: ParameterLayout, *, loss_scale: Mapping[str, Any] | None = None) -> None:
        check_layout(model, layout)
        self._model, self._layout = model, layout
        variables = model.trainable_variables
        self._optimizer = TorchRecordingOptimizer(
            model.optimizer, variables, layout, loss_scale or own_loss_scale(model.optimizer)
        )
        replace_everywhere(model, self._optimizer)
        self._version = int(self._optimizer.iterations)
        self._denominator = LossDenominator(model)
        self._run = _compiled(model.train_step, model)

    def prepare(self, batch: Any) -> PreparedTensors:
        """Convert a pytree of arrays to those that the step needs, ahead of the call."""
        pytree = as_tensors(batch)
        leaves = [leaf for leaf in keras.tree.flatten(pytree) if leaf is not None]
        return PreparedTensors(pytree, int(leaves[0].shape[0]))

    def __call__(self, weights: Any, batch: Any, *, version: int | None = None, share: float = 1.0) -> GradientResult:
        """Compute the gradient of one batch.

        Args:
            weights: Flat weights, shape ``(P,)``, float32; copied.
            batch: Argument of ``train_step``: a pytree of arrays, or a prepared one.
            version: Number of updates applied so far, the value of ``optimizer.iterations``; None: one more than last.
            share: Fraction of the samples of a union of batches in this one.

        Raises:
            CaptureError: ``train_step`` contains an operation that cannot be distributed.
            Exception: any exception of the user's code.
        """
        self._version = self._version + 1 if version is None else version + 1
        batch = batch if isinstance(batch, PreparedTensors) else self.prepare(batch)
        _assign(weights, self._model, self._layout)
        self._optimizer.begin(self._version - 1)
        self._denominator.begin(1.0 / share)
        logs = flat_logs(self._run(batch.pytree), "train_step", _as_log)
        gradient, finite = self._optimizer.collect()
        denominator = self._denominator.end()
        if denominator is SUM:
            gradient *= np.float32(share)
        return GradientResult(gradient, logs, finite, denominator)


class TorchEvaluateStep:
    """One evaluation step of a model on PyTorch; it updates the model's metrics as in Keras.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        check_layout(model, layout)
        self._model, self._layout = model, layout
        self._run = _compiled(model.test_step, model)

    def __call__(self, weights: Any, batch: Any) -> dict[str, Any]:
        """Evaluate one batch.

        Args:
            weights: Flat weights, shape ``(P,)``, float32; copied.
            batch: Argument of ``test_step``.

        Returns:
            Logs that ``test_step`` returned: name -> 0-d float32 array, or an array.
        """
        _assign(weights, self._model, self._layout)
        with torch.no_grad():
            return flat_logs(self._run(as_tensors(batch)), "test_step", _as_log)


class TorchOutputStep:
    """One prediction step of a model on PyTorch.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        check_layout(model, layout)
        self._model, self._layout = model, layout
        self._run = _compiled(model.predict_step, model)

    def __call__(self, weights: Any, batch: Any) -> list[Any]:
        """Return the leaves of what ``predict_step`` returns for flat weights, shape ``(P,)``, and a batch."""
        _assign(weights, self._model, self._layout)
        with torch.no_grad():
            return list(keras.tree.flatten(self._run(as_tensors(batch))))


class TorchRecordingOptimizer(ReplacingOptimizer):
    """An optimizer that changes no variable: it records the gradients that ``train_step`` passes to it.

    Args:
        replaced: The model's optimizer.
        variables: The trainable variables, in the layout's order.
        layout: Position of each variable in the flat vector.
        loss_scale: Dynamic scale of the loss, ``{"initial_scale", "dynamic_growth_steps"}``; None: a fixed one.
    """

    def __init__(
        self,
        replaced: Any,
        variables: Sequence[Any],
        layout: ParameterLayout,
        loss_scale: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(replaced)
        places = {variable_key(self, variable): place for place, variable in enumerate(variables)}
        factor = replaced.loss_scale_factor or 1.0
        self._recording = _EagerGradients(layout, places, loss_scale or {"initial_scale": factor}, bool(loss_scale))

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss, scaled as by the replaced optimizer."""
        return loss * self._recording.scale if self._recording.scale != 1.0 else loss

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Record the gradients of these variables for this step.

        Raises:
            ValueError: no variable has a gradient, as in Keras.
            CaptureError: a variable does not belong to the model, or already has a gradient.
        """
        grads = list(grads)
        if not grads:
            return
        keys = None if trainable_variables is None else [variable_key(self, v) for v in trainable_variables]
        self._recording.add(grads, keys)
        self.iterations.assign_add(1)

    def begin(self, version: int) -> None:
        """Drop the last step's gradients; ``version`` becomes ``iterations``."""
        self._recording.gradients.clear()
        self.iterations.assign(version)

    def collect(self) -> tuple[Any, bool]:
        """Return the step's flat, unscaled float32 gradient on the host, shape ``(P,)``, and whether it is finite.

        Raises:
            CaptureError: no gradient was recorded.
        """
        return self._recording.collect()


class _EagerGradients:
    """The gradients of one step; a separate class, because Keras tracks the attributes of an optimizer."""

    def __init__(
        self, layout: ParameterLayout, places: Mapping[Any, int], scaling: Mapping[str, Any], dynamic: bool
    ) -> None:
        self._layout, self._places = layout, places
        self.scale = float(scaling["initial_scale"])
        self._growth_steps = int(scaling["dynamic_growth_steps"]) if dynamic else 0
        self._finite_steps = 0
        self.gradients: dict[int, Any] = {}

    def add(self, grads: Sequence[Any], keys: Sequence[Any] | None) -> None:
        """Record gradients of the variables with these keys; None: of all."""
        places = list(range(len(grads))) if keys is None else [self._places.get(key) for key in keys]
        found = {place: grad for place, grad in zip(places, grads, strict=True) if grad is not None}
        if not found:
            raise ValueError("No gradients provided for any variable.")
        if None in found:
            raise CaptureError(
                "train_step() updates a variable that is not one of the model's trainable variables. "
                "Assign the layer that owns it to an attribute of the model before compile()."
            )
        if twice := self.gradients.keys() & found.keys():
            raise CaptureError(
                f"train_step() applies the optimizer twice to {self._layout.slots[min(twice)].name!r}: one step is one "
                "update here. Let every call of train_step() apply one gradient per variable."
            )
        self.gradients.update({place: grad for place, grad in found.items() if place is not None})

    def collect(self) -> tuple[Any, bool]:
        """Return the flat gradient without the scale, and whether it is finite; updates a dynamic scale."""
        slots = self._layout.slots
        if slots and not self.gradients:
            raise CaptureError("train_step() never calls self.optimizer.apply(...): there is no gradient to send.")
        flat = np.zeros(self._layout.size, np.float32)
        for place, gradient in self.gradients.items():
            slot = slots[place]
            torch.from_numpy(flat[slot.start : slot.stop]).copy_(gradient.detach().reshape(-1))
        if self.scale != 1.0:
            flat /= np.float32(self.scale)
        if not self._growth_steps:
            return flat, True
        finite = bool(np.isfinite(flat).all())
        self._finite_steps = self._finite_steps + 1 if finite else 0
        if self._finite_steps == self._growth_steps:
            self._finite_steps = 0
            self.scale *= 2.0
        elif not finite:
            self.scale *= 0.5
        return flat, finite


def _compiled(step: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Wrap a step as Keras would run it for this model."""
    compiled: Callable[..., Any] = torch.compile(step) if compiles_torch(model) else step
    return compiled


def _assign(weights: Any, model: Any, layout: ParameterLayout) -> None:
    """Copy flat weights to the trainable variables."""
    flat = torch.from_numpy(np.require(weights, requirements=["W"]))
    with torch.no_grad():
        for slot, variable in zip(layout.slots, model.trainable_variables, strict=True):
            variable.value.copy_(flat[slot.start : slot.stop].reshape(slot.shape))


def _as_log(_: str, value: Any) -> Any:
    array = keras.ops.convert_to_numpy(value)
    return array.astype(np.float32) if array.ndim == 0 else array
