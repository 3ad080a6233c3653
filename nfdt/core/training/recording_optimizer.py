"""An optimizer that moves nothing: it keeps the gradients that ``train_step`` hands it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import CaptureError
from nfdt.core.keras_internals import raw_learning_rate, variable_key
from nfdt.core.training.loss_scale import LossScale


class RecordingOptimizer(keras.optimizers.Optimizer):
    """Stands in for the model's optimizer while a worker computes gradients.

    Everything it does not have itself (``momentum``, ``get_config``, ...) is read from the optimizer it replaces.

    Args:
        replaced: The model's optimizer.
        variables: The trainable variables, in the layout's order.
        layout: Place of each variable in the flat vector.
        scale: Scales the loss, and the gradient back.
        tables: Variables, by index, of which only the rows are recorded that have a gradient.
    """

    def __init__(
        self,
        replaced: Any,
        variables: Sequence[Any],
        layout: ParameterLayout,
        scale: LossScale,
        tables: Sequence[int] = (),
    ) -> None:
        super().__init__(learning_rate=0.0, name="recording_optimizer")
        self._replaced = replaced
        self._scale = scale
        self._gradients = _Gradients(layout, {variable_key(self, v): i for i, v in enumerate(variables)}, tables)
        self.iterations.assign(replaced.iterations)
        self.built = True

    def __getattr__(self, name: str) -> Any:
        replaced = vars(self).get("_replaced")
        if replaced is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(replaced, name)

    @property
    def learning_rate(self) -> Any:
        """The rate of the replaced optimizer; a schedule's at this step's iterations."""
        inner = getattr(self._replaced, "inner_optimizer", self._replaced)
        rate = raw_learning_rate(inner)
        # Keras evaluates a schedule at the replaced optimizer's own counter, which stands still here.
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(self.iterations)
        return inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        raise CaptureError(
            "train_step() sets optimizer.learning_rate: the rate belongs to the parameter server while the job runs. "
            "Use a learning-rate schedule, or a callback."
        )

    def scale_loss(self, loss: Any) -> Any:
        """The loss, scaled as the replaced optimizer would."""
        return self._scale.scaled(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients of these variables for this step.

        Raises:
            ValueError: no variable has a gradient, as in Keras.
            CaptureError: a variable that is not one of the model's, or a second gradient for one of them.
        """
        grads = list(grads)
        if trainable_variables is None:
            places = list(range(len(grads)))
        else:
            places = [self._gradients.place(v, variable_key(self, v)) for v in trainable_variables]
        pairs = [(place, g) for place, g in zip(places, grads, strict=True) if g is not None]
        if not pairs and grads:
            raise ValueError("No gradients provided for any variable.")
        self._gradients.add(pairs)
        self.iterations.assign_add(1)

    def begin(self, version: Any) -> None:
        """Forget the last step's gradients; ``version`` becomes ``iterations``."""
        self._gradients.clear()
        self.iterations.assign(version)

    def collect(self) -> tuple[Any, Any]:
        """The step's flat, unscaled float32 gradient, shape ``(P,)``, and whether it is finite.

        Raises:
            CaptureError: nothing was recorded.
        """
        return self.unscaled(self.recorded())

    def collect_rows(self) -> tuple[Any, tuple[Any, ...], Any]:
        """As :meth:`collect`, with the tables behind everything else, in rows; and the rows' numbers for each table.

        Numbers come in any order, and as often as they were looked up.
        """
        index = self._gradients.index()
        gradient, finite = self.collect()
        return gradient, index, finite

    def recorded(self) -> Any:
        """The step's flat float32 gradient as it came, shape ``(P,)``, still scaled as the loss was.

        Raises:
            CaptureError: nothing was recorded.
        """
        return self._gradients.flat()

    def unscaled(self, gradient: Any) -> tuple[Any, Any]:
        """A recorded gradient without the loss scale, and whether it is finite; moves a dynamic scale on."""
        return self._scale.unscaled(gradient)


class _Gradients:
    """The gradients of one step. A class of its own, because Keras would track what an optimizer holds."""

    def __init__(self, layout: ParameterLayout, places: Mapping[Any, int], tables: Sequence[int]) -> None:
        self._layout = layout
        self._places = places
        self._tables = tuple(tables)
        self._order = [*(i for i in range(len(layout.slots)) if i not in self._tables), *self._tables]
        self._recorded: dict[int, Any] = {}
        self._index: dict[int, Any] = {}
        self._graph: Any = None
        self._buffer: Any = None

    def place(self, variable: Any, key: Any) -> int:
        """Which variable of the layout this is."""
        if key not in self._places:
            name = getattr(variable, "path", variable.name)
            raise CaptureError(
                f"train_step() updates {name!r}, which is not one of the model's trainable variables. "
                "Assign the layer that owns it to an attribute of the model before compile()."
            )
        return self._places[key]

    def clear(self) -> None:
        """Begin a step, in the graph that is being built (or eagerly)."""
        self._recorded.clear()
        self._index.clear()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def add(self, pairs: list[tuple[int, Any]]) -> None:
        """Keep gradients."""
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._graph:
            self._record(pairs)
        else:
            self._write(pairs)

    def _record(self, pairs: list[tuple[int, Any]]) -> None:
        if twice := self._recorded.keys() & {place for place, _ in pairs}:
            raise CaptureError(
                f"train_step() applies the optimizer twice to {self._layout.slots[min(twice)].name!r}: one step is one "
                "update here. Let every call of train_step() apply one gradient per variable."
            )
        for place, gradient in pairs:
            if place in self._tables and isinstance(gradient, tf.IndexedSlices):
                self._index[place] = tf.cast(gradient.indices, tf.int64)
                gradient = gradient.values
            self._recorded[place] = _flat(gradient)

    def _write(self, pairs: list[tuple[int, Any]]) -> None:
        """Gradients of an inner graph (a decorated train_step, a tf.cond) leave it through a variable.

        TensorFlow may trace such a graph twice, or not again when the step is; the variable serves all its traces.
        """
        if self._buffer is None:
            with tf.init_scope():
                self._buffer = tf.Variable(tf.zeros(self._layout.size), trainable=False)
        for place, gradient in pairs:
            slot = self._layout.slots[place]
            self._buffer[slot.start : slot.stop].assign(_flat(gradient))

    def flat(self) -> Any:
        """One vector of all gradients, zeros where a variable has none."""
        if not self._recorded and self._buffer is None:
            raise CaptureError(
                "train_step() never calls self.optimizer.apply_gradients(...) or apply(...): "
                "there is no gradient to send."
            )
        flat = tf.concat([self._of(place) for place in self._order], 0)
        self._recorded.clear()  # tensors of a graph must not outlive its trace
        self._index.clear()
        if self._buffer is not None:
            self._buffer.assign(tf.zeros_like(self._buffer))
        return flat

    def _of(self, place: int) -> Any:
        """The gradient of one variable: the recorded part and the part from the buffer."""
        slot, recorded = self._layout.slots[place], self._recorded.get(place)
        written = None if self._buffer is None else self._buffer[slot.start : slot.stop]
        if place in self._index and written is not None:
            return tf.concat([recorded, written], 0)
        found = [part for part in (recorded, written) if part is not None]
        return tf.add_n(found) if found else tf.zeros(slot.size)

    def index(self) -> tuple[Any, ...]:
        """For each table the numbers of the rows that :meth:`flat` will give; all where they are not known."""
        found = []
        for place in self._tables:
            every = tf.range(self._layout.slots[place].shape[0], dtype=tf.int64)
            known = self._index.get(place)
            parts = [known] if known is not None and self._buffer is None else [known, every]
            found.append(tf.concat([part for part in parts if part is not None], 0))
        return tuple(found)


def _flat(gradient: Any) -> Any:
    """One gradient, sparse ones summed up, as a float32 vector."""
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])
