"""One synchronous step of a rank: the gradient of its rows, the mean over all ranks, the user's optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hfdt.runtime.shared_denominator import SharedDenominator
from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.errors import ShapeMismatch, UsageError
from nfdt.model.backends.contract import as_tensors, own_loss_scale
from nfdt.model.backends.denominator import LossDenominator
from nfdt.model.backends.direct_call import DirectCall, Prepared
from nfdt.model.backends.tensorflow_step import in_graph, of_this_graph, replace_optimizer, step_logs
from nfdt.model.keras_internals import training as keras_training
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.optimizer import inner_optimizer
from nfdt.model.program.state import State

GRADIENT = "hfdt_gradient"
BUCKET = 2**20  # elements; smaller messages cost more than they hide


class AllreduceStep:
    """Model and optimizer on one rank; weights stay equal on all ranks because all apply the same updates.

    The gradients are reduced before clipping and before the optimizer. A dynamic loss scale depends on the reduced
    gradient, so that all ranks skip the same steps. They are reduced in buckets of consecutive variables, of which the
    last ones are ready first: while they are on the network, the gradients of the variables before are computed.

    Args:
        model: A compiled, built model; its optimizer is replaced by a recording one.
        manifest: Program of the model.
        state: Initial state.
        reduce: Sums a tensor over all ranks, by a name.
        shared: Agreement of the ranks on the denominator of the loss.
        scales: Whether :meth:`set_factor` will be called.

    Attributes:
        shared: See the argument.
    """

    def __init__(
        self,
        model: Any,
        manifest: Manifest,
        state: State,
        reduce: Callable[[Any, str], Any],
        shared: SharedDenominator,
        *,
        scales: bool = False,
    ) -> None:
        self._model = model
        self.layout = manifest.layout
        self._buckets = buckets(self.layout)
        # A separate graph: only there do the operations have the same names on ranks with and without rows.
        specs = [tf.TensorSpec([_size(self.layout, bucket)], tf.float32) for bucket in self._buckets]
        names = [GRADIENT if len(specs) == 1 else f"{GRADIENT}.{number}" for number in range(len(specs))]
        self._reduce: list[Any] = [
            tf.function(lambda gradient, name=name: reduce(gradient, name), input_signature=[spec])
            for spec, name in zip(specs, names, strict=True)
        ]
        self._variables = list(model.trainable_variables)
        self.optimizer = inner_optimizer(model)
        scale = manifest.loss_scale or own_loss_scale(model.optimizer)
        self._recording = replace_optimizer(model, self.layout, scale)
        self._denominator, self.shared = LossDenominator(model), shared
        self.optimizer.loss_scale_factor = None  # the recording optimizer removes the scale
        self.optimizer.build(self._variables)
        if self.optimizer.weight_decay and not all(manifest.decay or ()):
            # The optimizer's configuration, from which it was made, lacks exclude_from_weight_decay().
            keras_training.set_weight_decay_use(self.optimizer, self._variables, manifest.decay or ())
        self.load(State(state.weights, state.optimizer))
        self._factor = _scale_learning_rate(self.optimizer) if scales else None
        self._compute: Any = in_graph(self._computed, model)
        self._apply: Any = in_graph(self._applied, model)
        self._run = DirectCall(self._whole, None if model.run_eagerly else _graph)

    def __call__(self, batch: Any, weight: float, pause: Callable[[float], None] | None = None) -> Mapping[str, Any]:
        """Train on this rank's part of a global batch; collective.

        Args:
            batch: A pytree of arrays, or a prepared one; None for a rank without rows.
            weight: Fraction of the global batch in this part.
            pause: Called with the time of the gradient in seconds, before it is reduced, to emulate a slower rank.

        Returns:
            The logs of ``train_step`` on this rank; empty without rows.
        """
        share = tf.constant(np.float32(weight))  # of a Python number TensorFlow keeps the tensor for ever
        if batch is None:
            self.shared.agree(None, has_rows=False)
            nothing = [tf.zeros([_size(self.layout, bucket)]) for bucket in self._buckets]
            self._reduce_and_apply(share, nothing, tf.constant(0.0))
            return {}
        prepared = batch if isinstance(batch, Prepared) else self.prepare(batch)
        if pause is None and self.shared.is_known:
            return dict(self._run(share, prepared))
        began = time.perf_counter()
        gradients, logs, counted = self._compute(as_tensors(prepared.pytree), share)
        _await(gradients)
        if pause is not None:
            pause(time.perf_counter() - began)
        self.shared.agree(counted, has_rows=True)
        self._reduce_and_apply(share, gradients, counted)
        return dict(logs)

    def prepare(self, batch: Any) -> Prepared:
        """Convert a pytree of arrays to the tensors that the step needs, ahead of the call."""
        return self._run.prepare(batch)

    def probe(self, batch: Any) -> None:
        """Compute the gradient of a batch and discard it."""
        _await(self._compute(as_tensors(batch), tf.constant(1.0))[0])

    def _whole(self, share: Any, batch: Any) -> dict[str, Any]:
        gradients, logs, counted = self._compute(batch, share)
        self._reduce_and_apply(share, gradients, counted)
        return logs

    def _reduce_and_apply(self, share: Any, gradients: Sequence[Any], counted: Any) -> None:
        weight = self.shared.share(counted, share)
        if self._variables:
            self._apply([reduce(g * weight) for reduce, g in zip(self._reduce, gradients, strict=True)])

    def _computed(self, batch: Any, share: Any) -> tuple[list[Any], dict[str, Any], Any]:
        """Return gradients, logs, and the denominator if it is a tensor; sums are scaled to the batch of all ranks."""
        self._recording.begin_step(tf.cast(self.optimizer.iterations.value, tf.int64))
        self._denominator.begin_step(1.0 / share)
        logs = step_logs(self._model.train_step(batch), "train_step")
        denominator = of_this_graph(self._denominator.end_step())
        counted = denominator if tf.is_tensor(denominator) else None
        return self._recording.gradients.parts(self._buckets), logs, counted

    def _applied(self, reduced: Sequence[Any]) -> None:
        whole = tf.ensure_shape(tf.concat(reduced[::-1], 0), [self.layout.size])  # the last variables come first
        (gradient,), finite = self._recording.loss_scale.unscaled([whole])
        parts = [
            tf.cast(tf.reshape(gradient[slot.start : slot.stop], slot.shape), variable.dtype)
            for slot, variable in zip(self.layout.slots, self._variables, strict=True)
        ]

        def update() -> None:
            self.optimizer.apply(parts, self._variables)

        if tf.get_static_value(finite):  # without a dynamic loss scale
            update()
        else:
            tf.cond(finite, update, lambda: None)

    # ---- state

    def set_factor(self, value: float) -> None:
        """Multiply the learning rate by this factor from the next step on."""
        assert self._factor is not None
        self._factor.assign(value)

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


def buckets(layout: ParameterLayout) -> list[list[int]]:
    """Return the indices of the variables of each bucket: consecutive, and the last variables in the first bucket."""
    found: list[list[int]] = [[]]
    for index in reversed(range(len(layout.slots))):
        if _size(layout, found[-1]) >= BUCKET:
            found.append([])
        found[-1].insert(0, index)
    return found


def _size(layout: ParameterLayout, bucket: Sequence[int]) -> int:
    return sum(layout.slots[index].size for index in bucket)


def _await(gradients: Sequence[Any]) -> None:
    """Wait until the gradients are computed."""
    for gradient in gradients:
        np.asarray(gradient[:1])


def _graph(function: Any) -> Any:
    """Wrap a whole step; XLA compiles its parts, see :func:`in_graph`, but not Horovod's operation between them."""
    return tf.function(tf.autograph.experimental.do_not_convert(function), reduce_retracing=True)


def _scale_learning_rate(optimizer: Any) -> Any:
    """Scale the optimizer's rate by a factor, which starts at 1, for every read during a step; return the factor."""
    factor = tf.Variable(1.0, trainable=False)
    plain = keras_training.learning_rate_method(optimizer)

    def scaled() -> Any:
        return tf.convert_to_tensor(plain(), tf.float32) * factor

    keras_training.replace_learning_rate_method(optimizer, scaled)
    return factor
