"""An optimizer that changes no variable: it records the gradients that ``train_step`` passes to it; and loss scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.backends.recording import RecordingOptimizer, StepGradients


class LossScale:
    """Scales a loss and unscales its gradient.

    The dynamic scale halves after a gradient that is not finite and doubles after ``dynamic_growth_steps`` finite ones,
    as in ``keras.optimizers.LossScaleOptimizer``.

    Args:
        factor: A fixed factor, or None.
        dynamic: ``{"initial_scale", "dynamic_growth_steps"}``, or None for no dynamic scaling.
    """

    def __init__(self, factor: float | None, dynamic: Mapping[str, Any] | None) -> None:
        self._factor = factor
        self._growth_steps = int(dynamic["dynamic_growth_steps"]) if dynamic else 0
        self._scale = tf.Variable(float(dynamic["initial_scale"]), trainable=False) if dynamic else None
        self._finite_steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def value(self) -> float:
        """Scale of the next step."""
        return float(self._scale) if self._scale is not None else self._factor or 1.0

    def scaled(self, loss: Any) -> Any:
        """Return ``loss`` times the scale."""
        if self._scale is not None:
            return loss * tf.cast(self._scale, loss.dtype)
        return loss * self._factor if self._factor is not None else loss

    def unscaled(self, gradient: Any) -> tuple[Any, Any]:
        """Return the unscaled gradient, and whether it is finite (always True without dynamic scaling)."""
        if self._scale is None:
            return gradient / self._factor if self._factor is not None else gradient, tf.constant(True)
        scale = self._scale.read_value()
        finite = tf.reduce_all(tf.math.is_finite(gradient))
        grows = tf.logical_and(finite, tf.equal(self._finite_steps, self._growth_steps - 1))
        counts_on = tf.logical_and(finite, tf.logical_not(grows))
        self._scale.assign(scale * tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5))
        self._finite_steps.assign(tf.where(counts_on, self._finite_steps + 1, tf.zeros_like(self._finite_steps)))
        return gradient / scale, finite


class GraphRecordingOptimizer(RecordingOptimizer):
    """Replacement of the model's optimizer while a worker computes gradients with TensorFlow.

    Args:
        replaced: The model's optimizer.
        variables: The trainable variables, in the layout's order.
        layout: Position of each variable in the flat vector.
        scale: Scales the loss and unscales the gradient.
        tables: Variables, by index, of which only rows with a gradient are recorded.
    """

    gradients: _GraphGradients

    def __init__(
        self,
        replaced: Any,
        variables: Sequence[Any],
        layout: ParameterLayout,
        scale: LossScale,
        tables: Sequence[int] = (),
    ) -> None:
        super().__init__(replaced, variables, _GraphGradients(layout, tables))
        self._scale = scale

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss, scaled as by the replaced optimizer."""
        return self._scale.scaled(loss)

    def collect(self) -> tuple[Any, Any]:
        """Return the step's flat, unscaled float32 gradient, shape ``(P,)``, and whether it is finite.

        Raises:
            CaptureError: no gradient was recorded.
        """
        return self.unscaled(self.recorded())

    def collect_rows(self) -> tuple[Any, tuple[Any, ...], Any]:
        """Return the result of :meth:`collect` with the tables' rows at the end, and each table's row numbers.

        Row numbers are in any order, and repeat as often as the rows were looked up.
        """
        index = self.gradients.index()
        gradient, finite = self.collect()
        return gradient, index, finite

    def recorded(self) -> Any:
        """Return the step's flat float32 gradient, shape ``(P,)``, still scaled like the loss.

        Raises:
            CaptureError: no gradient was recorded.
        """
        return self.gradients.flat()

    def recorded_parts(self, groups: Sequence[Sequence[int]]) -> list[Any]:
        """Return :meth:`recorded` in parts: one vector for each group of consecutive variables, given by index.

        Each part depends on the gradients of its own variables only.
        """
        return self.gradients.parts(groups)

    def unscaled(self, gradient: Any) -> tuple[Any, Any]:
        """Return a recorded gradient without the loss scale, and whether it is finite; updates a dynamic scale."""
        return self._scale.unscaled(gradient)


class _GraphGradients(StepGradients):
    """The gradients of one step, which may be in graphs within that of the step."""

    applied_by = "self.optimizer.apply_gradients(...) or apply(...)"

    def __init__(self, layout: ParameterLayout, tables: Sequence[int]) -> None:
        super().__init__(layout)
        self._tables = tuple(tables)
        self._order = [*(i for i in range(len(layout.slots)) if i not in self._tables), *self._tables]
        self._index: dict[int, Any] = {}
        self._graph: Any = None
        self._buffer: Any = None

    def clear(self) -> None:
        """Begin a step, in the graph that is being built (or eagerly)."""
        super().clear()
        self._index.clear()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def add(self, gradients: Mapping[int, Any]) -> None:
        """Record gradients; see ``StepGradients``."""
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            self._write(gradients)
            return
        super().add(gradients)
        for place, gradient in gradients.items():
            if place in self._tables and isinstance(gradient, tf.IndexedSlices):
                self._index[place] = tf.cast(gradient.indices, tf.int64)
                gradient = gradient.values
            self.recorded[place] = _flat(gradient)

    def _write(self, gradients: Mapping[int, Any]) -> None:
        """Write gradients of an inner graph (a decorated train_step, a tf.cond) to a variable that outlives it.

        TensorFlow may trace such a graph twice, or not again when the step is retraced; all traces use the variable.
        """
        if self._buffer is None:
            with tf.init_scope():
                self._buffer = tf.Variable(tf.zeros(self.layout.size), trainable=False)
        for place, gradient in gradients.items():
            slot = self.layout.slots[place]
            self._buffer[slot.start : slot.stop].assign(_flat(gradient))

    def flat(self) -> Any:
        """Return one vector of all gradients, those of the tables last."""
        return self.parts([self._order])[0]

    def parts(self, groups: Sequence[Sequence[int]]) -> list[Any]:
        """Return one vector for each group of variables, given by index, zeros where a variable has no gradient."""
        if not self._order:
            return [tf.zeros(0) for _ in groups]
        if self._buffer is None:
            self.require_any()
        parts = [tf.concat([self._of(place) for place in group], 0) for group in groups]
        self.recorded.clear()  # tensors of a graph must not outlive its trace
        self._index.clear()
        if self._buffer is not None:
            self._buffer.assign(tf.zeros_like(self._buffer))
        return parts

    def _of(self, place: int) -> Any:
        """Return the gradient of one variable: the recorded part and the part from the buffer."""
        slot, recorded = self.layout.slots[place], self.recorded.get(place)
        written = None if self._buffer is None else self._buffer[slot.start : slot.stop]
        if place in self._index and written is not None:
            return tf.concat([recorded, written], 0)
        found = [part for part in (recorded, written) if part is not None]
        return tf.add_n(found) if found else tf.zeros(slot.size)

    def index(self) -> tuple[Any, ...]:
        """Return for each table the numbers of the rows that :meth:`flat` will return; all rows if unknown."""
        found = []
        for place in self._tables:
            every = tf.range(self.layout.slots[place].shape[0], dtype=tf.int64)
            known = self._index.get(place)
            parts = [known] if known is not None and self._buffer is None else [known, every]
            found.append(tf.concat([part for part in parts if part is not None], 0))
        return tuple(found)


def _flat(gradient: Any) -> Any:
    """Return a gradient as a float32 vector; the slices of a sparse gradient are summed."""
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])
