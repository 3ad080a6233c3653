"""One synchronous step of a rank: the gradient of its rows, the mean over all ranks, the user's optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core import keras_internals
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import ShapeMismatch, UsageError
from nfdt.core.program.batch_tensors import as_tensors
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.optimizer import inner_optimizer
from nfdt.core.program.state import State
from nfdt.core.training.gradient_step import in_graph, replace_optimizer, step_logs
from nfdt.core.training.step_result import own_loss_scale

GRADIENT = "hfdt_gradient"


class AllreduceStep:
    """Model and optimizer on one rank; weights stay equal on all ranks because all apply the same updates.

    The gradients of all variables are reduced as one vector, before clipping and before the optimizer. A dynamic loss
    scale depends on the reduced gradient, so that all ranks skip the same steps.

    Args:
        model: A compiled, built model; its optimizer is replaced by a recording one.
        manifest: Program of the model.
        state: Initial state.
        reduce: Sums a tensor over all ranks, by a name.
        scales: Whether :meth:`set_factor` will be called.
    """

    def __init__(
        self,
        model: Any,
        manifest: Manifest,
        state: State,
        reduce: Callable[[Any, str], Any],
        *,
        scales: bool = False,
    ) -> None:
        self._model = model
        self.layout = manifest.layout
        # A separate graph: only there does the operation have the same name on ranks with and without rows.
        flat = tf.TensorSpec([self.layout.size], tf.float32)
        self._reduce: Any = tf.function(lambda gradient: reduce(gradient, GRADIENT), input_signature=[flat])
        self._variables = list(model.trainable_variables)
        self.optimizer = inner_optimizer(model)
        scale = manifest.loss_scale or own_loss_scale(model.optimizer)
        self._recording = replace_optimizer(model, self.layout, scale)
        self.optimizer.loss_scale_factor = None  # the recording optimizer removes the scale
        self.optimizer.build(self._variables)
        self._respect_decay(manifest)
        self.load(State(state.weights, state.optimizer))
        self._factor = _scale_learning_rate(self.optimizer) if scales else None
        self._compute: Any = in_graph(self._computed, model)
        self._apply: Any = in_graph(self._applied, model)
        whole = tf.autograph.experimental.do_not_convert(self._whole)
        self._run: Any = whole if model.run_eagerly else tf.function(whole, reduce_retracing=True)

    def __call__(self, batch: Any, weight: float, pause: Callable[[float], None] | None = None) -> Mapping[str, Any]:
        """Train on this rank's part of a global batch; collective.

        Args:
            batch: A pytree of arrays; None for a rank without rows.
            weight: Fraction of the global batch in this part.
            pause: Called with the time of the gradient in seconds, before it is reduced, to emulate a slower rank.

        Returns:
            The logs of ``train_step`` on this rank; empty without rows.
        """
        share = tf.constant(np.float32(weight))  # of a Python number TensorFlow keeps the tensor for ever
        if batch is None:
            self._reduce_and_apply(tf.zeros([self.layout.size]))
            return {}
        if pause is None:
            return dict(self._run(as_tensors(batch), share))
        began = time.perf_counter()
        gradient, logs = self._compute(as_tensors(batch))
        np.asarray(gradient[:1])  # waits until it is computed
        pause(time.perf_counter() - began)
        self._reduce_and_apply(gradient * share)
        return dict(logs)

    def probe(self, batch: Any) -> None:
        """Compute the gradient of a batch and discard it."""
        np.asarray(self._compute(as_tensors(batch))[0][:1])

    def _whole(self, batch: Any, share: Any) -> dict[str, Any]:
        gradient, logs = self._compute(batch)
        self._reduce_and_apply(gradient * share)
        return logs

    def _reduce_and_apply(self, gradient: Any) -> None:
        if self._variables:
            self._apply(self._reduce(gradient))

    def _computed(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        self._recording.begin(tf.cast(self.optimizer.iterations.value, tf.int64))
        logs = step_logs(self._model.train_step(batch), "train_step")
        return self._recording.recorded(), logs

    def _applied(self, reduced: Any) -> None:
        gradient, finite = self._recording.unscaled(tf.ensure_shape(reduced, [self.layout.size]))
        parts = [
            tf.cast(tf.reshape(gradient[slot.start : slot.stop], slot.shape), variable.dtype)
            for slot, variable in zip(self.layout.slots, self._variables, strict=True)
        ]
        if tf.get_static_value(finite):
            self.optimizer.apply(parts, self._variables)
            return

        def move() -> None:
            self.optimizer.apply(parts, self._variables)

        tf.cond(finite, move, lambda: None)

    def _respect_decay(self, manifest: Manifest) -> None:
        """Apply the program's ``decay``: an optimizer's configuration lacks ``exclude_from_weight_decay()``."""
        if not self.optimizer.weight_decay or all(manifest.decay or ()):
            return
        keras_internals.set_weight_decay_use(self.optimizer, self._variables, manifest.decay or ())

    # ---- state

    def set_factor(self, value: float) -> None:
        """Multiply the learning rate by this factor from the next step on."""
        assert self._factor is not None
        self._factor.assign(value)

    def set_learning_rate(self, value: float) -> None:
        """Replace the learning rate.

        Raises:
            UsageError: the optimizer follows a schedule.
        """
        if not keras_internals.has_fixed_learning_rate(self.optimizer):
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


def _scale_learning_rate(optimizer: Any) -> Any:
    """Scale the optimizer's rate by a factor, which starts at 1, for every read during a step; return the factor."""
    factor = tf.Variable(1.0, trainable=False)
    plain = keras_internals.learning_rate_method(optimizer)

    def scaled() -> Any:
        return tf.convert_to_tensor(plain(), tf.float32) * factor

    keras_internals.replace_learning_rate_method(optimizer, scaled)
    return factor
