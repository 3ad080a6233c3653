"""A training step on several devices of TensorFlow: a copy of the model on each, and one graph that adds gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.backends.contract import GradientResult
from nfdt.model.backends.direct_call import DirectCall, leaves_of
from nfdt.model.backends.tensorflow_step import GradientStep, in_graph, step_logs


class DividedStep(GradientStep):
    """Step whose batches are divided among the model and copies of it on other devices.

    The gradients combine by their denominators, as those of several workers (``denominator.py``). Metrics are added up.
    Untrained numbers, as BatchNorm statistics, become the mean of those on the devices, by samples. Batches that are
    sparse, ragged, or have fewer samples than there are devices are computed whole on the first device.

    Args:
        model: A compiled, built model that does not run eagerly.
        layout: Layout of its trainable variables.
        loss_scale: None; a dynamic scale would have to follow all gradients.
        copies: The model once more on each other device, with seeds of its own; its metrics add up.
    """

    def __init__(
        self, model: Any, layout: ParameterLayout, loss_scale: Mapping[str, Any] | None, copies: Sequence[Any]
    ) -> None:
        super().__init__(model, layout, loss_scale=loss_scale, in_pieces=True)
        self._steps = [self, *(GradientStep(copy, layout, loss_scale=loss_scale, in_pieces=True) for copy in copies)]
        self._compiled = [in_graph(step.gradient_of, step.model) for step in self._steps]
        for copy in copies:
            copy.reset_metrics()
        self._reset = [variable.numpy() for variable in (copies[0].metrics_variables if copies else [])]
        # XLA compiles for one device: here the part of each device, not the whole.
        self._divided = DirectCall(self._everywhere, _as_graph)

    @property
    def traces(self) -> int:
        """Number of traces of the step."""
        return super().traces + self._divided.traces

    def _compute(self, weights: Any, batch: Any, version: int, share: float) -> GradientResult:
        dense = all(isinstance(tensor, tf.Tensor) and tensor.shape.rank for tensor in batch.tensors)
        if not dense or min(len(tensor) for tensor in batch.tensors) < len(self._steps):
            return super()._compute(weights, batch, version, share)
        return self._result(self._divided, weights, batch, version, share)

    def _everywhere(self, weights: Any, batch: Any, version: Any) -> tuple[Any, ...]:
        rows = tf.shape(leaves_of(batch)[0])[0]
        count, found, samples = len(self._steps), [], []
        self._send_state()
        for number, (step, run) in enumerate(zip(self._steps, self._compiled, strict=True)):
            begin, end = rows * number // count, rows * (number + 1) // count
            with tf.device(_device_of(step.model)):
                part = tf.nest.map_structure(lambda leaf, b=begin, e=end: None if leaf is None else leaf[b:e], batch)
                share = tf.cast(end - begin, tf.float32) / tf.cast(rows, tf.float32)
                found.append(run(weights, part, version, self.factor / share))
            samples.append(share)
        parts, _, logs, finite, _ = found[0]
        counted = [each[4] for each in found]
        sums = self.is_sum
        masses = samples if counted[0] is None else counted
        total = tf.add_n(masses)
        factors = [tf.ones([])] * count if sums else [mass / total for mass in masses]
        in_pieces = isinstance(parts, list)
        pieces = [each[0] if in_pieces else [each[0]] for each in found]
        joined = [tf.add_n([f * p for f, p in zip(factors, one, strict=True)]) for one in zip(*pieces, strict=True)]
        self._take_state(samples)
        finite = tf.reduce_all([each[3] for each in found])
        results = step_logs(self.model.get_metrics_result(), "train_step")
        logs = {
            name: results[name] if name in results else _mean([each[2][name] for each in found], samples)
            for name in logs
        }
        denominator = None if sums or counted[0] is None else total
        return joined if in_pieces else joined[0], (), logs, finite, denominator

    def _send_state(self) -> None:
        """Give the copies the untrained numbers of the model, and reset their metrics."""
        for step in self._steps[1:]:
            for own, other in zip(_numbers(self.model), _numbers(step.model), strict=True):
                other.assign(own.value)
            for variable, value in zip(step.model.metrics_variables, self._reset, strict=True):
                variable.assign(tf.constant(value))

    def _take_state(self, samples: Sequence[Any]) -> None:
        """Give the model the mean of the untrained numbers, and what the copies have counted."""
        models = [step.model for step in self._steps]
        for held in zip(*map(_numbers, models), strict=True):
            held[0].assign(_mean([variable.value for variable in held], samples))
        for model in models[1:]:
            for own, other, reset in zip(
                self.model.metrics_variables, model.metrics_variables, self._reset, strict=True
            ):
                own.assign_add(other.value - tf.constant(reset))


def _as_graph(function: Any) -> Any:
    return tf.function(tf.autograph.experimental.do_not_convert(function), reduce_retracing=True)


def _numbers(model: Any) -> list[Any]:
    """Return the untrained variables of a model that are numbers of which a mean can be; seeds are not."""
    return [v for v in model.non_trainable_variables if np.dtype(v.value.dtype.as_numpy_dtype).kind in "fV"]


def _mean(values: Sequence[Any], shares: Sequence[Any]) -> Any:
    if not values[0].dtype.is_floating:
        return values[0]
    pairs = zip(values, shares, strict=True)
    return tf.cast(tf.add_n([tf.cast(value, tf.float32) * share for value, share in pairs]), values[0].dtype)


def _device_of(model: Any) -> str:
    """Return the device on which a model has its variables."""
    return str(next((variable.value.device for variable in model.variables), ""))
