"""The user's own ``train_step`` and ``test_step`` on JAX as functions of weights and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.backends.contract import as_tensors
from nfdt.core.backends.denominator import SUM, LossDenominator
from nfdt.core.backends.recording import ReplacingOptimizer, replace_everywhere
from nfdt.core.backends.step_result import GradientResult, check_layout, flat_logs, own_loss_scale
from nfdt.core.errors import CaptureError


@dataclass(frozen=True)
class PreparedArrays:
    """A batch as arrays of JAX, and its number of samples."""

    pytree: Any
    samples: int


class JaxGradientStep:
    """One training step of a model on JAX: one function, compiled once per batch signature.

    The model's optimizer is permanently replaced by one that records gradients. The step updates metrics, BatchNorm
    statistics and seeds of the model as in Keras; its trainable variables keep their values.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
        loss_scale: The program's ``loss_scale``; None takes it from the model's own LossScaleOptimizer.

    Attributes:
        model: The model.
        optimizer: Its recording optimizer.
        sums: Whether the loss is a sum; known after the first step.
    """

    def __init__(self, model: Any, layout: ParameterLayout, *, loss_scale: Mapping[str, Any] | None = None) -> None:
        self.model, self._layout = model, layout
        check_layout(model, layout)
        self.optimizer = JaxRecordingOptimizer(model.optimizer, layout, loss_scale or own_loss_scale(model.optimizer))
        replace_everywhere(model, self.optimizer)
        self._version = int(self.optimizer.iterations)
        self._changing = [*model.non_trainable_variables, *model.metrics_variables, *self.optimizer.variables]
        self._counts = _counts(model, self.optimizer)
        self._by_variable = jax.default_backend() == "cpu"
        self._denominator, self.sums = LossDenominator(model), False
        self.traces = 0
        self._run = _compiled(self.pure, model)

    def prepare(self, batch: Any) -> PreparedArrays:
        """Convert a pytree of arrays to those that the step needs, ahead of the call."""
        pytree = as_tensors(batch)
        return PreparedArrays(pytree, int(jax.tree.leaves(pytree)[0].shape[0]))

    def __call__(self, weights: Any, batch: Any, *, version: int | None = None, share: float = 1.0) -> GradientResult:
        """Compute the gradient of one batch.

        Args:
            weights: Flat weights, shape ``(P,)``, float32.
            batch: Argument of ``train_step``: a pytree of arrays, or a prepared one.
            version: Number of updates applied so far, the value of ``optimizer.iterations``; None: one more than last.
            share: Fraction of the samples of a union of batches in this one.

        Raises:
            CaptureError: ``train_step`` contains an operation that cannot be distributed.
            Exception: any exception of the user's code.
        """
        self._version = self._version + 1 if version is None else version + 1
        batch = batch if isinstance(batch, PreparedArrays) else self.prepare(batch)
        self.optimizer.iterations.assign(self._version - 1)
        held = [variable.value for variable in self._changing]
        factor = np.float32(1.0 / share)
        gradient, logs, finite, changed, counted = self._run(self._cut(weights), held, batch.pytree, factor)
        for variable, value in zip(self._changing, changed, strict=True):
            variable.assign(value)
        return GradientResult(self._joined(gradient), logs, bool(finite), SUM if self.sums else counted)

    def _cut(self, weights: Any) -> Any:
        """Return the weights as the compiled function takes them: on CPUs by variable, as cutting takes long there."""
        if not self._by_variable:
            return weights
        weights = np.asarray(weights)
        return [weights[slot.start : slot.stop].reshape(slot.shape) for slot in self._layout.slots]

    def _joined(self, gradient: Any) -> Any:
        if not self._by_variable:
            return gradient
        parts = [np.asarray(part) for part in gradient]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def pure(
        self, weights: Any, held: list[Any], batch: Any, factor: Any
    ) -> tuple[Any, dict[str, Any], Any, list[Any], Any]:
        """Return gradient, logs, whether it is finite, ``held`` after the step, and the denominator if it is a number.

        ``held``: untrained variables, those of metrics, and of the optimizer; ``factor``: of losses that are sums.
        """
        self.traces += 1
        untrained, metrics, own = _split(held, self._counts)
        recording = self.optimizer.recording
        recording.begin()
        self._denominator.begin(factor)
        state = (_unflatten(weights, self._layout, self.model.trainable_variables), untrained, own, metrics)
        logs, state = self.model.train_step(state, batch)
        _, untrained, own, metrics = state
        parts, finite = recording.collect()
        denominator = self._denominator.end()
        self.sums = denominator is SUM
        if self.sums:
            parts, denominator = [part / factor for part in parts], None
        gradient = parts if self._by_variable else _concatenated(parts)
        return gradient, flat_logs(logs, "train_step", as_log), finite, [*untrained, *metrics, *own], denominator


class JaxEvaluateStep:
    """One evaluation step of a model on JAX; it updates the model's metrics as in Keras.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        self._model, self._layout = model, layout
        check_layout(model, layout)
        self._changing = [*model.non_trainable_variables, *model.metrics_variables]
        self._counts = _counts(model)
        self._run = _compiled(self._pure, model)

    def __call__(self, weights: Any, batch: Any) -> dict[str, Any]:
        """Evaluate one batch.

        Args:
            weights: Flat weights, shape ``(P,)``, float32.
            batch: Argument of ``test_step``.

        Returns:
            Logs that ``test_step`` returned: name -> 0-d float32 array, or an array.
        """
        logs, changed = self._run(weights, [variable.value for variable in self._changing], as_tensors(batch))
        for variable, value in zip(self._changing, changed, strict=True):
            variable.assign(value)
        return dict(logs)

    def _pure(self, weights: Any, held: list[Any], batch: Any) -> tuple[dict[str, Any], list[Any]]:
        untrained, metrics = _split(held, self._counts)
        trainable = _unflatten(weights, self._layout, self._model.trainable_variables)
        logs, (_, untrained, metrics) = self._model.test_step((trainable, untrained, metrics), batch)
        return flat_logs(logs, "test_step", as_log), [*untrained, *metrics]


class JaxOutputStep:
    """One prediction step of a model on JAX; it leaves the model as it is.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        check_layout(model, layout)
        self._model, self._layout = model, layout
        self._run = _compiled(self._pure, model)

    def __call__(self, weights: Any, batch: Any) -> list[Any]:
        """Return the leaves of what ``predict_step`` returns for flat weights, shape ``(P,)``, and a batch."""
        held = [variable.value for variable in self._model.non_trainable_variables]
        return list(self._run(weights, held, as_tensors(batch)))

    def _pure(self, weights: Any, untrained: list[Any], batch: Any) -> list[Any]:
        trainable = _unflatten(weights, self._layout, self._model.trainable_variables)
        outputs, _ = self._model.predict_step((trainable, untrained), batch)
        return list(keras.tree.flatten(outputs))


class JaxRecordingOptimizer(ReplacingOptimizer):
    """An optimizer that changes no variable: it records the gradients that ``train_step`` passes to it.

    Args:
        replaced: The model's optimizer.
        layout: Layout of the trainable variables.
        loss_scale: Dynamic scale of the loss, ``{"initial_scale", "dynamic_growth_steps"}``; None: a fixed one.

    Attributes:
        recording: Gradients of the step that is being traced.
    """

    def __init__(self, replaced: Any, layout: ParameterLayout, loss_scale: Mapping[str, Any] | None) -> None:
        super().__init__(replaced)
        self._scale: Any = None
        if loss_scale is not None:
            initial = keras.initializers.Constant(float(loss_scale["initial_scale"]))
            self._scale = self.add_variable(shape=(), initializer=initial, dtype="float32", name="dynamic_scale")
            self._finite_steps = self.add_variable(shape=(), initializer="zeros", dtype="int32", name="finite_steps")
        self._growth_steps = int(loss_scale["dynamic_growth_steps"]) if loss_scale else 0
        self._factor = None if loss_scale else replaced.loss_scale_factor
        self.recording = _TracedGradient(layout)

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss, scaled as by the replaced optimizer."""
        if self._scale is not None:
            return loss * keras.ops.cast(self._scale, loss.dtype)
        return loss * self._factor if self._factor is not None else loss

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
        """Record the gradients of this step; return the trainable variables as they are.

        Raises:
            CaptureError: the gradients are not one for each trainable variable, or the second of this step.
        """
        iterations, rate, *scaling = optimizer_variables
        parts = self.recording.vectors(grads)
        finite: Any = jax.numpy.array(True)
        if scaling:
            scale, finite_steps = scaling
            finite = jax.numpy.array([jax.numpy.isfinite(part).all() for part in parts]).all()
            parts = [part / scale for part in parts]
            grows = finite & (finite_steps == self._growth_steps - 1)
            scaling = [
                scale * jax.numpy.where(finite, jax.numpy.where(grows, 2.0, 1.0), 0.5),
                jax.numpy.where(finite & ~grows, finite_steps + 1, 0),
            ]
        elif self._factor is not None:
            parts = [part / self._factor for part in parts]
        self.recording.set(parts, finite)
        return trainable_variables, [iterations + 1, rate, *scaling]


class _TracedGradient:
    """The gradient of one step; a separate class, because Keras tracks the attributes of an optimizer."""

    def __init__(self, layout: ParameterLayout) -> None:
        self._layout = layout
        self._recorded: tuple[list[Any], Any] | None = None

    def begin(self) -> None:
        """Drop the gradient of the last step."""
        self._recorded = None

    def vectors(self, grads: Sequence[Any]) -> list[Any]:
        """Return gradients as float32 vectors, zeros for those that are None."""
        slots = self._layout.slots
        if len(grads) != len(slots):
            raise CaptureError(
                f"train_step() passes {len(grads)} gradients to the optimizer. Expected: one for each of the model's "
                f"{len(slots)} trainable variables, as Keras' stateless_apply() does."
            )
        zeros, float32 = jax.numpy.zeros, jax.numpy.float32
        return [
            zeros(slot.size, float32) if grad is None else grad.astype(float32).reshape(-1)
            for grad, slot in zip(grads, slots, strict=True)
        ]

    def set(self, parts: list[Any], finite: Any) -> None:
        """Set the gradient of this step, and whether it is finite."""
        if self._recorded is not None:
            raise CaptureError(
                "train_step() applies the optimizer twice: one step is one update here. Let every call of "
                "train_step() apply one gradient per variable."
            )
        self._recorded = parts, finite

    def collect(self) -> tuple[list[Any], Any]:
        """Return the gradient of this step by variable, and whether it is finite."""
        if self._recorded is None:
            raise CaptureError(
                "train_step() never calls self.optimizer.stateless_apply(...): there is no gradient to send."
            )
        found, self._recorded = self._recorded, None
        return found


def _compiled(function: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Wrap a function as Keras would run it for this model."""
    return function if model.run_eagerly or not model.jit_compile else jax.jit(function)


def _concatenated(parts: list[Any]) -> Any:
    return jax.numpy.concatenate(parts) if parts else jax.numpy.zeros(0, jax.numpy.float32)


def _unflatten(weights: Any, layout: ParameterLayout, variables: Sequence[Any]) -> list[Any]:
    """Return values of the variables, of flat weights or of those of each variable."""
    if isinstance(weights, list):
        pairs = zip(weights, variables, strict=True)
        return [value.astype(keras.backend.standardize_dtype(variable.dtype)) for value, variable in pairs]
    return [
        weights[slot.start : slot.stop].reshape(slot.shape).astype(keras.backend.standardize_dtype(variable.dtype))
        for slot, variable in zip(layout.slots, variables, strict=True)
    ]


def _counts(model: Any, optimizer: Any = None) -> tuple[int, ...]:
    counts = len(model.non_trainable_variables), len(model.metrics_variables)
    return counts if optimizer is None else (*counts, len(optimizer.variables))


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    left = iter(values)
    return [[next(left) for _ in range(count)] for count in counts]


def as_log(_: str, value: Any) -> Any:
    """Return a log as a 0-d float32 array, or as an array."""
    array = jax.numpy.asarray(value)
    return array.astype("float32") if array.ndim == 0 else array
