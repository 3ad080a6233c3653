"""An optimizer that moves nothing: it keeps the gradients that ``train_step`` hands it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from nfdt.core.arrays import ParameterLayout
from nfdt.core.errors import CaptureError


class RecordingOptimizer(keras.optimizers.Optimizer):
    """Stands in for the model's optimizer while a worker computes gradients.

    Everything it does not have itself (``momentum``, ``get_config``, ...) is read from the optimizer it replaces.
    It scales the loss for float16 as Keras' LossScaleOptimizer does and hands out unscaled gradients.

    Args:
        replaced: The model's optimizer.
        variables: The trainable variables, in the layout's order.
        layout: Where each lies in the flat vector.
        loss_scale: ``{"initial_scale", "dynamic_growth_steps"}``, or None for no dynamic scaling.
    """

    def __init__(
        self,
        replaced: Any,
        variables: Sequence[Any],
        layout: ParameterLayout,
        loss_scale: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(learning_rate=0.0, name="recording_optimizer")
        self._replaced = replaced
        self._layout = layout
        self._places = {self._var_key(v): i for i, v in enumerate(variables)}
        self._recorded: dict[int, Any] = {}
        self._step_graph: Any = None
        self._buffer: Any = None
        self._buffered = False
        self._static_scale = replaced.loss_scale_factor
        self._growth_steps = int(loss_scale["dynamic_growth_steps"]) if loss_scale else 0
        self._dynamic_scale = tf.Variable(loss_scale["initial_scale"], dtype=tf.float32) if loss_scale else None
        self._finite_steps = tf.Variable(0, dtype=tf.int64)
        self._iterations.assign(replaced.iterations)
        self.built = True

    def __getattr__(self, name: str) -> Any:
        replaced = vars(self).get("_replaced")
        if replaced is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(replaced, name)

    @property
    def learning_rate(self) -> Any:
        """The rate of the replaced optimizer; a schedule's at this step's iterations."""
        # Private: Keras evaluates a schedule at the replaced optimizer's own counter, which stands still here.
        inner = getattr(self._replaced, "inner_optimizer", self._replaced)
        if isinstance(inner._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            return inner._learning_rate(self._iterations)
        return inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        raise CaptureError(
            "train_step() sets optimizer.learning_rate: the rate belongs to the parameter server while the job runs. "
            "Use a learning-rate schedule, or a callback."
        )

    def scale_loss(self, loss: Any) -> Any:
        """The loss, scaled as the replaced optimizer would."""
        if self._dynamic_scale is not None:
            return loss * tf.cast(self._dynamic_scale, loss.dtype)
        return loss * self._static_scale if self._static_scale is not None else loss

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Keep the gradients of these variables for this step.

        Raises:
            ValueError: no variable has a gradient, as in Keras.
            CaptureError: a variable that is not one of the model's, or a second gradient for one of them.
        """
        grads = list(grads)
        places = range(len(grads)) if trainable_variables is None else [self._place(v) for v in trainable_variables]
        pairs = [(place, g) for place, g in zip(places, grads, strict=True) if g is not None]
        if not pairs and grads:
            raise ValueError("No gradients provided for any variable.")
        if twice := self._recorded.keys() & {place for place, _ in pairs}:
            raise CaptureError(
                f"train_step() applies the optimizer twice to {self._layout.slots[min(twice)].name!r}: one step is one "
                "update here. Let every call of train_step() apply one gradient per variable."
            )
        self._iterations.assign_add(1)
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph() is self._step_graph:
            self._recorded.update((place, _flat(g)) for place, g in pairs)
        else:
            self._write_buffer(pairs)

    def _place(self, variable: Any) -> int:
        place = self._places.get(self._var_key(variable))
        if place is None:
            name = getattr(variable, "path", variable.name)
            raise CaptureError(
                f"train_step() updates {name!r}, which is not one of the model's trainable variables. "
                "Assign the layer that owns it to an attribute of the model before compile()."
            )
        return place

    def _write_buffer(self, pairs: list[tuple[int, Any]]) -> None:
        """Gradients of an inner graph (a decorated train_step, a tf.cond) reach the step through a variable."""
        if self._buffer is None:
            with tf.init_scope():
                self._buffer = tf.Variable(tf.zeros(self._layout.size), trainable=False)
        self._buffered = True
        for place, gradient in pairs:
            slot = self._layout.slots[place]
            self._buffer[slot.start : slot.stop].assign(_flat(gradient))

    def begin(self, version: Any) -> None:
        """Forget the last step's gradients; ``version`` becomes ``iterations``."""
        self._recorded.clear()
        self._buffered = False
        self._step_graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._iterations.assign(version)
        if self._buffer is not None:
            self._buffer.assign(tf.zeros_like(self._buffer))

    def collect(self) -> tuple[Any, Any]:
        """The step's flat, unscaled float32 gradient, shape ``(P,)``, and whether it is finite.

        Raises:
            CaptureError: nothing was recorded.
        """
        if not self._recorded and not self._buffered:
            raise CaptureError(
                "train_step() never calls self.optimizer.apply_gradients(...) or apply(...): "
                "there is no gradient to send."
            )
        slots = self._layout.slots
        parts = [self._recorded[i] if i in self._recorded else tf.zeros(s.size) for i, s in enumerate(slots)]
        flat = tf.concat(parts, 0)
        if self._buffered:
            flat = flat + self._buffer
        self._recorded.clear()
        return self._unscaled(flat)

    def _unscaled(self, flat: Any) -> tuple[Any, Any]:
        if self._dynamic_scale is None:
            return flat / self._static_scale if self._static_scale is not None else flat, tf.constant(True)
        scale = self._dynamic_scale.read_value()
        finite = tf.reduce_all(tf.math.is_finite(flat))
        grown = tf.logical_and(finite, tf.equal(self._finite_steps, self._growth_steps - 1))
        counted = tf.where(
            tf.logical_or(grown, tf.logical_not(finite)), tf.zeros_like(self._finite_steps), self._finite_steps + 1
        )
        self._dynamic_scale.assign(scale * tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5))
        self._finite_steps.assign(counted)
        return flat / scale, finite


def _flat(gradient: Any) -> Any:
    """One gradient, sparse ones summed up, as a float32 vector."""
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])
