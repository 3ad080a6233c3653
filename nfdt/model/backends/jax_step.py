"""The user's own ``train_step`` and ``test_step`` on JAX as functions of weights and batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import (
    GradientResult,
    LocalStep,
    PreparedBatch,
    TrainingStep,
    check_layout,
    flat_logs,
    own_loss_scale,
)
from nfdt.model.backends.denominator import SUM, LossDenominator
from nfdt.model.backends.jax_devices import Placement
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.backends.recording import RecordingOptimizer, StepGradients, next_loss_scale, replace_everywhere
from nfdt.model.backends.variables import assign_values

MOST_MEMORY_MAPS = 0.5  # of those that the kernel allows


class JaxStep(TrainingStep):
    """A step of a model on JAX, on the devices of the distribution under which the step is made."""

    def __init__(self) -> None:
        self._placement = Placement()

    def prepare(self, batch: Any) -> PreparedBatch:
        """Convert a pytree of arrays to tensors on the devices, before the call."""
        pytree = self._placement.batch(batch)
        return PreparedBatch(pytree, [leaf for leaf in keras.tree.flatten(pytree) if leaf is not None])


class JaxGradientStep(JaxStep):
    """One training step of a model on JAX: one function, compiled once per batch signature.

    The model's optimizer is permanently replaced by one that records gradients. The trainable variables keep their
    values.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
        loss_scale: The program's ``loss_scale``; None takes it from the model's own LossScaleOptimizer.

    Attributes:
        optimizer: Its recording optimizer.
        changing: The variables that a step changes: untrained ones, those of metrics, and of the optimizer.
        sums: Whether the loss is a sum; known after the first step.
    """

    def __init__(self, model: Any, layout: ParameterLayout, loss_scale: Mapping[str, Any] | None) -> None:
        check_layout(model, layout)
        super().__init__()
        self.model, self._layout = model, layout
        self.optimizer = JaxRecordingOptimizer(model.optimizer, layout, loss_scale or own_loss_scale(model.optimizer))
        replace_everywhere(model, self.optimizer)
        self._version = int(self.optimizer.iterations)
        self.changing = [*model.non_trainable_variables, *model.metrics_variables, *self.optimizer.variables]
        self._counts = [len(model.non_trainable_variables), len(model.metrics_variables), len(self.optimizer.variables)]
        self._by_variable = self._placement.is_distributed or jax.default_backend() == "cpu"
        self._denominator, self.sums = LossDenominator(model), False
        self._traces = 0
        self._run = _compiled(self.pure, model)

    @property
    def traces(self) -> int:
        """Number of runs of the step's Python code: of traces, or of all steps of an eager model."""
        return self._traces

    def _compute(self, weights: Any, batch: PreparedBatch, version: int, share: float) -> GradientResult:
        self.optimizer.iterations.assign(version)
        held = [variable.value for variable in self.changing]
        factor = np.float32(1.0 / share)
        gradient, logs, finite, changed, counted = self._run(self._cut(weights), held, batch.pytree, factor)
        assign_values(self.changing, changed)
        return GradientResult(self._joined(gradient), logs, bool(finite), SUM if self.sums else counted)

    def _cut(self, weights: Any) -> Any:
        """Return the weights in the form that the compiled function takes."""
        # Decision 52: on CPUs, with 10 million weights, a step that cuts the vector itself takes 107 ms instead of 35.
        # Of variables on several devices, each device gets the parts that it holds.
        if not self._by_variable:
            return weights
        return self._placement.weights(_parts(np.asarray(weights), self._layout), self.model.trainable_variables)

    def _joined(self, gradient: Any) -> Any:
        if not self._by_variable:
            return gradient
        parts = [np.asarray(part).reshape(-1) for part in gradient]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    def pure(
        self, weights: Any, held: list[Any], batch: Any, factor: Any
    ) -> tuple[Any, dict[str, Any], Any, list[Any], Any]:
        """Return gradient, logs, whether it is finite, ``held`` after the step, and the denominator if it is a number.

        ``held``: untrained variables, those of metrics, and of the optimizer; ``factor``: of losses that are sums.
        """
        self._traces += 1
        untrained, metrics, own = _split(held, self._counts)
        self.optimizer.gradients.clear()
        self._denominator.begin_step(factor)
        state = (_unflatten(weights, self._layout, self.model.trainable_variables), untrained, own, metrics)
        logs, state = self.model.train_step(state, batch)
        _, untrained, own, metrics = state
        parts, finite = self.optimizer.collect()
        denominator = self._denominator.end_step()
        self.sums = denominator is SUM
        if self.sums:
            parts, denominator = [part / factor for part in parts], None
        parts = self._placement.constrained(parts, self.model.trainable_variables)
        gradient = parts if self._by_variable else joined(parts)
        return gradient, flat_logs(logs, "train_step", as_log), finite, [*untrained, *metrics, *own], denominator


class JaxLocalStep(JaxStep, LocalStep):
    """Step with the model's own optimizer: one function of the model's state, compiled once per batch signature."""

    def __init__(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> None:
        JaxStep.__init__(self)
        LocalStep.__init__(self, model, layout, progress)
        trained, untrained = model.trainable_variables, model.non_trainable_variables
        self._groups = [trained, untrained, model.optimizer.variables, model.metrics_variables]
        self._traces = 0
        self._run = _compiled(self._pure, model)

    @property
    def traces(self) -> int:
        """Number of runs of the step's Python code: of traces, or of all steps of an eager model."""
        return self._traces

    def train(self, batch: Any, position: int | None) -> dict[str, Any]:
        """Train on a prepared batch; see :class:`LocalStep`."""
        state = tuple([variable.value for variable in group] for group in self._groups)
        logs, state = self._run(state, batch.pytree, np.int32(-1 if position is None else position))
        for group, values in zip(self._groups, state, strict=True):
            assign_values(group, values)
        return logs

    def _pure(self, state: tuple[list[Any], ...], batch: Any, position: Any) -> tuple[dict[str, Any], Any]:
        self._traces += 1
        self.progress.position = position
        logs, state = self.model.train_step(state, batch)
        return flat_logs(logs, "train_step", as_log), state


def model_call(model: Any, layout: ParameterLayout, method: str) -> Callable[[Any, Any], Any]:
    """Return ``test_step`` or ``predict_step`` as a function of flat weights and a batch; see ``KerasBackend.call``.

    A prediction leaves the model as it is.
    """
    check_layout(model, layout)
    metrics = model.metrics_variables if method == "test_step" else []
    variables, counts = [*model.non_trainable_variables, *metrics], [len(model.non_trainable_variables), len(metrics)]

    def pure(weights: Any, held: list[Any], batch: Any) -> tuple[Any, list[Any]]:
        untrained, metrics = _split(held, counts)
        trainable = _unflatten(weights, layout, model.trainable_variables)
        if method == "predict_step":
            outputs, _ = model.predict_step((trainable, untrained), batch)
            return list(keras.tree.flatten(outputs)), held
        logs, (_, untrained, metrics) = model.test_step((trainable, untrained, metrics), batch)
        return flat_logs(logs, method, as_log), [*untrained, *metrics]

    run, placement = _compiled(pure, model), Placement()

    def call(weights: Any, batch: Any) -> Any:
        if placement.is_distributed:
            weights = placement.weights(_parts(np.asarray(weights), layout), model.trainable_variables)
        found, changed = run(weights, [variable.value for variable in variables], placement.batch(batch))
        assign_values(variables, changed)
        return found

    return call


class JaxRecordingOptimizer(RecordingOptimizer):
    """Replacement of the model's optimizer while a worker computes gradients with JAX.

    Args:
        replaced: The model's optimizer.
        layout: Layout of the trainable variables.
        loss_scale: Dynamic scale of the loss, ``{"initial_scale", "dynamic_growth_steps"}``; None: a fixed one.
    """

    gradients: _TracedGradients

    def __init__(self, replaced: Any, layout: ParameterLayout, loss_scale: Mapping[str, Any] | None) -> None:
        super().__init__(replaced, (), _TracedGradients(layout))
        self._scale: Any = None
        if loss_scale is not None:
            initial = keras.initializers.Constant(float(loss_scale["initial_scale"]))
            self._scale = self.add_variable(shape=(), initializer=initial, dtype="float32", name="dynamic_scale")
            self._finite_steps = self.add_variable(shape=(), initializer="zeros", dtype="int32", name="finite_steps")
        self._growth_steps = int(loss_scale["dynamic_growth_steps"]) if loss_scale else 0
        self._factor = None if loss_scale else replaced.loss_scale_factor

    @property
    def scales(self) -> bool:
        """Whether each step may change the scale of the loss."""
        return self._scale is not None

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
        parts = _by_slot(grads, self.gradients.layout)
        if scaling:
            scale, finite_steps = scaling
            finite = jax.numpy.array([jax.numpy.isfinite(part).all() for part in parts]).all()
            self.gradients.finite = finite
            parts = [part / scale for part in parts]
            scaling = list(next_loss_scale(scale, finite_steps, finite, self._growth_steps, jax.numpy.where))
        elif self._factor is not None:
            parts = [part / self._factor for part in parts]
        self.gradients.add(dict(enumerate(parts)))
        return trainable_variables, [iterations + 1, rate, *scaling]

    def collect(self) -> tuple[list[Any], Any]:
        """Return the gradient of this step by variable, and whether it is finite.

        Raises:
            CaptureError: no gradient was recorded.
        """
        self.gradients.require_any()
        found = list(self.gradients.recorded.values()), self.gradients.finite
        self.gradients.clear()  # arrays of a trace must not outlive it
        return found


class _TracedGradients(StepGradients):
    """The gradients of the step that is being traced, and whether they are finite."""

    applied_by = "self.optimizer.stateless_apply(...)"
    finite: Any = True

    def clear(self) -> None:
        """Begin a step."""
        super().clear()
        self.finite = jax.numpy.array(True)


def _by_slot(grads: Sequence[Any], layout: ParameterLayout) -> list[Any]:
    """Return gradients in float32 and in the shapes of their variables, zeros for those that are None."""
    slots = layout.slots
    if len(grads) != len(slots):
        raise CaptureError(
            f"train_step() passes {len(grads)} gradients to the optimizer. Expected: one for each of the model's "
            f"{len(slots)} trainable variables, as Keras' stateless_apply() does."
        )
    zeros, float32 = jax.numpy.zeros, jax.numpy.float32
    return [
        zeros(slot.shape, float32) if grad is None else grad.astype(float32)
        for grad, slot in zip(grads, slots, strict=True)
    ]


def _compiled(function: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Wrap a function as Keras would run it for this model."""
    return function if model.run_eagerly or not model.jit_compile else CompiledFunction(function)


class CompiledFunction:
    """A function of ``jax.jit`` that drops what it has compiled before the process runs out of memory maps.

    What is compiled for a signature takes hundreds of maps on CPUs: 57 for an MLP, 427 for ResNet-8. The kernel allows
    65,530 by default, and without a free one LLVM crashes the process.

    Args:
        function: Function of arrays.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._traced = function, False
        self._run = jax.jit(self._trace)

    def __call__(self, *args: Any) -> Any:
        """Call the function; it is compiled once per signature of its arguments, unless it was dropped."""
        result = self._run(*args)
        if self._traced:
            self._traced = False
            if _used_memory_maps() > MOST_MEMORY_MAPS:
                self._run.clear_cache()
        return result

    def _trace(self, *args: Any) -> Any:
        self._traced = True
        return self._function(*args)


def _used_memory_maps() -> float:
    """Return the share of the memory maps that the kernel allows this process that it has; 0 where it is unknown."""
    with contextlib.suppress(OSError):
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        return Path("/proc/self/maps").read_bytes().count(b"\n") / limit
    return 0.0


def joined(parts: Sequence[Any]) -> Any:
    """Return arrays as one float32 vector."""
    return jax.numpy.concatenate([p.reshape(-1) for p in parts]) if parts else jax.numpy.zeros(0, jax.numpy.float32)


def _unflatten(weights: Any, layout: ParameterLayout, variables: Sequence[Any]) -> list[Any]:
    """Return the values of the variables, given as flat weights or as a list by variable."""
    parts = weights if isinstance(weights, list) else _parts(weights, layout)
    pairs = zip(parts, variables, strict=True)
    return [part.astype(keras.backend.standardize_dtype(variable.dtype)) for part, variable in pairs]


def _parts(weights: Any, layout: ParameterLayout) -> list[Any]:
    return [weights[slot.start : slot.stop].reshape(slot.shape) for slot in layout.slots]


def _split(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    left = iter(values)
    return [[next(left) for _ in range(count)] for count in counts]


def as_log(_: str, value: Any) -> Any:
    """Return a log as a 0-d float32 array, or as an array."""
    array = jax.numpy.asarray(value)
    return array.astype("float32") if array.ndim == 0 else array
