"""One synchronous step of a rank: the gradient of its rows, the mean over all ranks, the user's optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hfdt.runtime.rank_step import RankStep, scale_learning_rate
from hfdt.runtime.shared_denominator import GatheringRanks, SharedDenominator
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.backends.contract import as_tensors
from nfdt.model.backends.denominator import LossDenominator
from nfdt.model.backends.direct_call import DirectCall, Prepared
from nfdt.model.backends.tensorflow_step import in_graph, of_this_graph, replace_optimizer, step_logs
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

GRADIENT, DENOMINATOR = "hfdt_gradient", "hfdt_denominator"
BUCKET = 2**20  # elements; smaller messages cost more than they hide


class SummingRanks(GatheringRanks, Protocol):
    """The ranks, as far as denominators in a graph need them."""

    def sum(self, tensor: Any, name: str) -> Any:
        """Return the sum of a tensor over all ranks; also usable inside a graph."""
        ...


class DenominatorInGraph(SharedDenominator):
    """Agreement on the denominator whose weights are computed in the graph of the step.

    Args:
        ranks: The ranks.
    """

    def __init__(self, ranks: SummingRanks) -> None:
        super().__init__(ranks)
        # A separate graph: only there has the operation the same name on ranks with and without rows.
        number = tf.TensorSpec([], tf.float32)
        self._sum: Any = tf.function(lambda own: ranks.sum(own, DENOMINATOR), input_signature=[number])

    def share(self, own: Any, share: Any) -> Any:
        """Return the weight of this rank's gradient in the mean of all; collective if denominators are counted.

        Args:
            own: Denominator of this rank, 0-d float32; None: that of its samples.
            share: Fraction of all samples in this rank's part, 0-d float32; 0 for a rank without rows.
        """
        if not self.is_counted:
            return share
        counted = share if own is None else tf.cast(own, tf.float32)
        return counted / self._sum(counted)


class AllreduceStep(RankStep):
    """Step on TensorFlow, with operations of Horovod in its graph.

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
        shared: DenominatorInGraph,
        *,
        scales: bool = False,
    ) -> None:
        super().__init__(model, manifest, state)
        self._buckets = buckets(self.layout)
        # A separate graph: only there do the operations have the same names on ranks with and without rows.
        specs = [tf.TensorSpec([_size(self.layout, bucket)], tf.float32) for bucket in self._buckets]
        names = [GRADIENT if len(specs) == 1 else f"{GRADIENT}.{number}" for number in range(len(specs))]
        self._reduce: list[Any] = [
            tf.function(lambda gradient, name=name: reduce(gradient, name), input_signature=[spec])
            for spec, name in zip(specs, names, strict=True)
        ]
        self._denominator, self.shared = LossDenominator(model), shared
        self._factor = _scale_learning_rate(self.optimizer) if scales else None
        self._compute: Any = in_graph(self._computed, model)
        self._apply: Any = in_graph(self._applied, model)
        self._run = DirectCall(self._whole, None if model.run_eagerly else _graph)

    def _replace_optimizer(self, model: Any, loss_scale: Mapping[str, Any] | None) -> None:
        self._recording = replace_optimizer(model, self.layout, loss_scale)

    def __call__(self, batch: Any, weight: float, pause: Callable[[float], None] | None = None) -> Mapping[str, Any]:
        """Train on this rank's part of a global batch; collective."""
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

    def set_factor(self, value: float) -> None:
        """Multiply the learning rate by this factor from the next step on."""
        assert self._factor is not None
        self._factor.assign(value)


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
    """Scale the optimizer's rate by a variable, which starts at 1; return the variable."""
    factor = tf.Variable(1.0, trainable=False)
    scale_learning_rate(optimizer, lambda rate: tf.convert_to_tensor(rate, tf.float32) * factor)
    return factor
