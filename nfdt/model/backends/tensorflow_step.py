"""Training steps on TensorFlow: the user's own ``train_step`` as a traced function of flat weights and a batch."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout, VariableSlot
from nfdt.core.arrays.safetensors_io import Pieces
from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import (
    GradientResult,
    LocalStep,
    TrainingStep,
    check_layout,
    flat_logs,
    own_loss_scale,
)
from nfdt.model.backends.denominator import SUM, LossDenominator
from nfdt.model.backends.direct_call import DirectCall, Prepared
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.backends.lookups import LookedUpTables, NumbersOfBatch
from nfdt.model.backends.recording import replace_everywhere
from nfdt.model.backends.tables import Tables
from nfdt.model.backends.tensorflow_recording import GraphGradients, GraphRecordingOptimizer, LossScale

IN_PIECES = 2**20
"""Elements of a gradient above which it leaves the step in pieces, as TensorFlow would join them in a second copy."""
CUT_TOGETHER = 2**14
"""Elements of neighbouring variables that are cut from a vector together, and so exist twice for a moment."""


class WeightSetter:
    """Assigns a flat vector to the trainable variables.

    Args:
        model: A built model.
        layout: Layout of its trainable variables.
        tables: Indices of variables that are not part of the vector.

    Raises:
        ShapeMismatch: the model has other trainable variables than the layout.
    """

    def __init__(self, model: Any, layout: ParameterLayout, tables: Sequence[int] = ()) -> None:
        check_layout(model, layout)
        self._variables = [v for i, v in enumerate(model.trainable_variables) if i not in tables]
        self._layout = layout.without(tables)
        self._runs = list(_small_together(self._layout.slots))

    @property
    def size(self) -> int:
        """Number of elements of the vector."""
        return self._layout.size

    def __call__(self, weights: Any) -> None:
        """Assign ``weights``, shape ``(P,)``, float32."""
        weights = tf.ensure_shape(weights, [self._layout.size])
        # Few nodes per variable in the step's graph: to trace one takes more than half a millisecond.
        for variable, slot, part in zip(self._variables, self._layout.slots, self._cut(weights), strict=True):
            shaped = part if len(slot.shape) == 1 else tf.reshape(part, slot.shape)
            variable.value.assign(tf.cast(shaped, variable.value.dtype))

    def _cut(self, weights: Any) -> Iterator[Any]:
        for run in self._runs:
            whole = weights[run[0].start : run[-1].stop]
            yield from tf.split(whole, [slot.size for slot in run]) if len(run) > 1 else [whole]

    def read(self) -> Any:
        """Return the current weights, shape ``(P,)``, float32."""
        parts = [tf.reshape(tf.cast(variable.value, tf.float32), [-1]) for variable in self._variables]
        return tf.concat(parts, 0) if parts else tf.zeros(0)


def _small_together(slots: Sequence[VariableSlot]) -> Iterator[list[VariableSlot]]:
    """Yield runs of neighbours of at most :data:`CUT_TOGETHER` elements together; a larger one is alone."""
    run: list[VariableSlot] = []
    for slot in slots:
        if run and slot.stop - run[0].start > CUT_TOGETHER:
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


class GraphStep(TrainingStep):
    """A training step whose calls are one ``tf.function`` call, traced once per batch signature.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
        tables: Variables, by index, that are not part of the flat weights.
    """

    def __init__(self, model: Any, layout: ParameterLayout, tables: Sequence[int] = ()) -> None:
        self.model = model
        self._weights = WeightSetter(model, layout, tables)
        self._run = direct_call(self._traced, model)

    @property
    def traces(self) -> int:
        """Number of traces of the step; 0 for an eager model."""
        return self._run.traces

    def prepare(self, batch: Any) -> Prepared:
        """Convert a pytree of arrays to the tensors that the step needs, ahead of the call."""
        return self._run.prepare(batch)

    @abstractmethod
    def _traced(self, weights: Any, batch: Any, *scalars: Any) -> Any:
        """Run the step on tensors: the function that is traced."""


class GradientStep(GraphStep):
    """Step that returns the gradient; the model's optimizer is permanently replaced by one that records it.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
        loss_scale: The program's ``loss_scale``; None takes it from the model's own LossScaleOptimizer.
        tables: Variables, by index, whose gradients are returned as rows.
        in_pieces: Return large gradients in pieces.

    Attributes:
        is_sum: Whether the loss is a sum; known after the first step.
        factor: Factor of losses that are sums, a ``tf.Variable``: 1 / share of the batch.
    """

    def __init__(
        self,
        model: Any,
        layout: ParameterLayout,
        *,
        loss_scale: Mapping[str, Any] | None = None,
        tables: Sequence[int] = (),
        in_pieces: bool = False,
    ) -> None:
        super().__init__(model, layout, tables)
        self._groups: list[list[int]] | None = None
        if in_pieces and not tables and layout.size >= IN_PIECES:
            numbers = itertools.count()
            self._groups = [[next(numbers) for _ in run] for run in _small_together(layout.slots)]
        self._looked_up = LookedUpTables.of(model)
        self._tables = self._looked_up or (Tables(model, layout, tables) if tables else None)
        self._optimizer = replace_optimizer(model, layout, loss_scale or own_loss_scale(model.optimizer), tables)
        self._row_numbers = None if self._looked_up is None else self._looked_up.numbers_of(self._without_values)
        self._version = int(self._optimizer.iterations)
        self._denominator, self.is_sum = LossDenominator(model), False
        self._share, self.factor = 1.0, tf.Variable(1.0, trainable=False)

    def _compute(self, weights: Any, batch: Any, version: int, share: float) -> GradientResult:
        dense = self._tables.assign(weights) if self._tables else weights
        return self._result(self._run, dense, batch, version, share)

    def _result(self, run: DirectCall, dense: Any, batch: Any, version: int, share: float) -> GradientResult:
        now = np.array(version, np.int64)  # of a Python number TensorFlow keeps the tensor for ever
        if share != self._share:
            self._share = share
            self.factor.assign(1.0 / share)
        gradient, index, logs, finite, counted = run(dense, batch, tf.constant(now))
        if self._tables:
            gradient = self._tables.gradient(gradient, index)
        elif self._groups is not None:
            gradient = Pieces.flat(gradient)
        return GradientResult(gradient, logs, bool(finite), SUM if self.is_sum else counted)

    @property
    def row_numbers(self) -> NumbersOfBatch | None:
        """Row numbers of each table that the step looks up for a batch; None if no table is on the shards."""
        return self._row_numbers

    def _without_values(self, batch: Any) -> None:
        """Run the step as far as row numbers are concerned."""
        self._traced(tf.zeros(self._weights.size), batch, tf.zeros([], tf.int64))

    def _traced(self, weights: Any, batch: Any, *scalars: Any) -> tuple[Any, ...]:
        (version,) = scalars
        return self.gradient_of(weights, batch, version, self.factor)

    def gradient_of(self, weights: Any, batch: Any, version: Any, factor: Any) -> tuple[Any, ...]:
        """Run the step on tensors: gradient, row numbers of tables, logs, whether it is finite, and denominator.

        ``factor``: of losses that are sums, 1 / share of the batch.
        """
        self._weights(weights)
        self._optimizer.begin_step(version)
        self._denominator.begin_step(factor)
        logs = step_logs(self.model.train_step(batch), "train_step")
        index = self._optimizer.gradients.index()  # before flat(), which drops what was recorded
        recorded = self._optimizer.gradients
        found = [recorded.flat()] if self._groups is None else recorded.parts(self._groups)
        parts, finite = self._optimizer.loss_scale.unscaled(found)
        denominator = of_this_graph(self._denominator.end_step())
        self.is_sum = denominator is SUM
        if self.is_sum:
            parts, denominator = [part / factor for part in parts], None
        return parts[0] if self._groups is None else parts, index, logs, finite, denominator


def of_this_graph(denominator: Any) -> Any:
    """Return a denominator, or None instead of a tensor of an inner graph, as of a decorated ``train_step``."""
    if not tf.is_tensor(denominator) or tf.executing_eagerly():
        return denominator
    return denominator if denominator.graph is tf.compat.v1.get_default_graph() else None


def in_graph(function: Any, model: Any) -> Any:
    """Wrap ``function`` as Keras would run it for this model: eagerly, or as one graph, compiled by XLA or not."""
    if model.run_eagerly:
        return function
    # One trace for batches of any size: XLA compiles each size anyway, and padding would change BatchNorm (decision 5).
    undecorated = tf.autograph.experimental.do_not_convert(function)
    return tf.function(undecorated, reduce_retracing=True, jit_compile=model.jit_compile)


def direct_call(function: Any, model: Any) -> DirectCall:
    """Wrap ``function`` of weights and batch as Keras would run it for this model, for frequent calls."""
    return DirectCall(function, None if model.run_eagerly else partial(in_graph, model=model))


def replace_optimizer(
    model: Any, layout: ParameterLayout, loss_scale: Mapping[str, Any] | None, tables: Sequence[int] = ()
) -> GraphRecordingOptimizer:
    """Replace every reference of the model to its optimizer by a recording optimizer."""
    replaced = model.optimizer
    gradients = GraphGradients(layout, tables, looked_up=LookedUpTables.of(model) is not None)
    scale = LossScale(None if loss_scale else replaced.loss_scale_factor, loss_scale)
    recording = GraphRecordingOptimizer(replaced, model.trainable_variables, gradients, scale)
    replace_everywhere(model, recording)
    return recording


def step_logs(logs: Any, method: str) -> dict[str, Any]:
    """Return a step's logs, nested dictionaries flattened as in Keras: numbers as 0-d float32 tensors, and arrays.

    Raises:
        CaptureError: the logs are not a dictionary, or contain text.
    """

    def as_log(name: str, value: Any) -> Any:
        tensor = tf.convert_to_tensor(value)
        if tensor.dtype == tf.string:
            raise CaptureError(f"{method}() must return numbers or arrays of them. Received: text as {name!r}.")
        return tf.cast(tensor, tf.float32) if tensor.shape.rank == 0 else tensor

    return flat_logs(logs, method, as_log)


class GraphLocalStep(GraphStep, LocalStep):
    """Step with the model's own optimizers, as one graph; see :class:`LocalStep`."""

    def __init__(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> None:
        GraphStep.__init__(self, model, layout)
        self.layout, self.progress = layout, progress
        self._train = direct_call(self._trained, model)

    @property
    def traces(self) -> int:
        """Number of traces of the step; 0 for an eager model."""
        return self._run.traces + self._train.traces

    def train(self, batch: Any, position: int | None) -> dict[str, Any]:
        """Train on a prepared batch; see :class:`LocalStep`."""
        now = np.array(-1 if position is None else position, np.int64)
        logs: dict[str, Any] = self._train(tf.constant(now), batch)
        return logs

    def _trained(self, position: Any, batch: Any) -> dict[str, Any]:
        self.progress.position = position
        return step_logs(self.model.train_step(batch), "train_step")

    def _compute(self, weights: Any, batch: Any, version: int, share: float) -> GradientResult:
        difference, logs = self._run(weights, batch, tf.constant(np.array(version, np.int64)))
        return GradientResult(difference, logs, finite=True)

    def _traced(self, weights: Any, batch: Any, *scalars: Any) -> tuple[Any, dict[str, Any]]:
        self._weights(weights)
        (self.progress.position,) = scalars
        before = self._weights.read()  # as the variables' dtypes hold them
        logs = step_logs(self.model.train_step(batch), "train_step")
        return before - self._weights.read(), logs
