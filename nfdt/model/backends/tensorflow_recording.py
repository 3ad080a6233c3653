"""The recording optimizer on TensorFlow, whose gradients may be in several graphs, and the scale of its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import CaptureError
from nfdt.model.backends.recording import RecordingOptimizer, StepGradients, next_loss_scale


class LossScale:
    """Scales a loss and unscales its gradient.

    Args:
        factor: A fixed factor, or None.
        dynamic: ``{"initial_scale", "dynamic_growth_steps"}``, or None for no dynamic scaling.
    """

    def __init__(self, factor: float | None, dynamic: Mapping[str, Any] | None) -> None:
        self._factor = factor
        self._growth_steps = int(dynamic["dynamic_growth_steps"]) if dynamic else 0
        self._scale = tf.Variable(float(dynamic["initial_scale"]), trainable=False) if dynamic else None
        self._finite_steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    def scaled(self, loss: Any) -> Any:
        """Return ``loss`` times the scale."""
        if self._scale is not None:
            return loss * tf.cast(self._scale, loss.dtype)
        return loss * self._factor if self._factor is not None else loss

    def unscaled(self, parts: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return the unscaled parts of a gradient, and whether it is finite (always True without dynamic scaling)."""
        if self._scale is None:
            return [part if self._factor is None else part / self._factor for part in parts], tf.constant(True)
        scale, steps = self._scale.read_value(), self._finite_steps.read_value()
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])
        next_scale, next_steps = next_loss_scale(scale, steps, finite, self._growth_steps, tf.where)
        self._scale.assign(next_scale)
        self._finite_steps.assign(next_steps)
        return [part / scale for part in parts], finite


class GraphRecordingOptimizer(RecordingOptimizer):
    """Replacement of the model's optimizer while a worker computes gradients with TensorFlow.

    Args:
        replaced: The model's optimizer.
        variables: The trainable variables, in the layout's order.
        gradients: Where to record.
        loss_scale: Scales the loss and unscales the gradient.

    Attributes:
        loss_scale: See the argument.
    """

    gradients: GraphGradients

    def __init__(
        self, replaced: Any, variables: Sequence[Any], gradients: GraphGradients, loss_scale: LossScale
    ) -> None:
        super().__init__(replaced, variables, gradients)
        self.loss_scale = loss_scale

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss, scaled as by the replaced optimizer."""
        return self.loss_scale.scaled(loss)


class GraphGradients(StepGradients):
    """The gradients of one step, which may be in graphs within that of the step.

    Args:
        layout: Position of each variable in the flat vector.
        tables: Variables, by index, of which only rows with a gradient are recorded.
        looked_up: Whether the variables of the tables have the rows of a batch only.
    """

    applied_by = "self.optimizer.apply_gradients(...) or apply(...)"

    def __init__(self, layout: ParameterLayout, tables: Sequence[int], *, looked_up: bool = False) -> None:
        super().__init__(layout)
        self._tables, self._looked_up = tuple(tables), looked_up
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
        """Record gradients by the index of their variable, those of an inner graph in a buffer."""
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

        Raises:
            CaptureError: tables are on the shards; the variable would have all their rows.
        """
        if self._looked_up:
            raise CaptureError(
                f"train_step() applies the gradient of {self.layout.slots[min(gradients)].name!r} in a graph of its "
                "own: expected one in the step itself, as tables of the model are on the shards. Set worker_tables_mb "
                "above the size of the tables."
            )
        if self._buffer is None:
            with tf.init_scope():
                self._buffer = tf.Variable(tf.zeros(self.layout.size), trainable=False)
        for place, gradient in gradients.items():
            slot = self.layout.slots[place]
            self._buffer[slot.start : slot.stop].assign(_flat(gradient))

    def flat(self) -> Any:
        """Return one float32 vector of all gradients, scaled like the loss; those of the tables are last.

        Raises:
            CaptureError: no gradient was recorded.
        """
        return self.parts([self._order])[0]

    def parts(self, groups: Sequence[Sequence[int]]) -> list[Any]:
        """Return :meth:`flat` in parts: one vector for each group of variables, given by index.

        Each part depends on the gradients of its own variables only. It has zeros where a variable has no gradient.
        """
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
        if self._looked_up and place in self._tables:
            return tf.zeros(0) if recorded is None else recorded
        written = None if self._buffer is None else self._buffer[slot.start : slot.stop]
        if place in self._index and written is not None:
            return tf.concat([recorded, written], 0)
        found = [part for part in (recorded, written) if part is not None]
        return tf.add_n(found) if found else tf.zeros(slot.size)

    def index(self) -> tuple[Any, ...]:
        """Return for each table the numbers of the rows that :meth:`flat` will return; all rows if unknown.

        Row numbers are in any order, and repeat as often as the rows were looked up.
        """
        found = []
        for place in self._tables:
            if self._looked_up:
                found.append(self._index_of_rows(place))
                continue
            every = tf.range(self.layout.slots[place].shape[0], dtype=tf.int64)
            known = self._index.get(place)
            parts = [known] if known is not None and self._buffer is None else [known, every]
            found.append(tf.concat([part for part in parts if part is not None], 0))
        return tuple(found)

    def _index_of_rows(self, place: int) -> Any:
        """Return the places, in the rows of the batch, of a recorded gradient; all of them for a dense one."""
        if place in self._index:
            return self._index[place]
        width, recorded = self.layout.slots[place].shape[1], self.recorded.get(place)
        return tf.range(0 if recorded is None else tf.size(recorded, out_type=tf.int64) // width, dtype=tf.int64)


def _flat(gradient: Any) -> Any:
    """Return a gradient as a float32 vector; the slices of a sparse gradient are summed."""
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])
