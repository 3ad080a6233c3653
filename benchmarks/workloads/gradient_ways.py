"""Gradients of many workers, each with separate weights, on TensorFlow: one by one, or together in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from benchmarks.workloads.images import Images
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.backends.tensorflow_step import GradientStep
from nfdt.model.training.data import ArraySource

WORKERS, SAMPLES = 16, 20_000

Compute = Callable[[], np.ndarray]
"""Gives a gradient per worker, shape ``(WORKERS, P)``."""


class Ways:
    """Gradients of :data:`WORKERS` workers, computed by every available method.

    Args:
        build: Makes the model.
        images: Training data.
        batch: Number of samples per gradient.
    """

    def __init__(self, build: Callable[[], keras.Model], images: Images, batch: int) -> None:
        self._model, self._step_model = build(), build()
        trainable = self._model.trainable_variables
        self._layout = ParameterLayout.of([(v.path, tuple(v.shape)) for v in trainable])
        self._step = GradientStep(self._step_model, self._layout)
        random, start = np.random.default_rng(0), self._layout.flatten([v.numpy() for v in trainable])
        self._weights = [start + random.normal(scale=0.01, size=start.shape).astype("float32") for _ in range(WORKERS)]
        self._rows = np.stack([random.permutation(SAMPLES)[:batch] for _ in range(WORKERS)])
        self._source = ArraySource([0, 1], [images.images[:SAMPLES], images.labels[:SAMPLES]])
        self._x, self._y = tf.constant(images.images[:SAMPLES]), tf.constant(images.labels[:SAMPLES])

    def all(self) -> Mapping[str, Compute]:
        """Return all methods by name."""
        return {
            "one by one": self.one_by_one,
            "one by one, graphs alone": self._graphs_alone(),
            "scanned": self._together(self._scanned, jit=False),
            "vectorised": self._together(self._vectorised, jit=False),
            "vectorised, XLA": self._together(self._vectorised, jit=True),
        }

    def one_by_one(self) -> np.ndarray:
        """Compute the gradients one after the other, as the simulator does."""
        pairs = zip(self._weights, self._rows, strict=True)
        return np.stack([self._step(held, tuple(self._source.batch(rows)), version=1).gradient for held, rows in pairs])

    def _graphs_alone(self) -> Compute:
        """Call the graphs without gathering rows, copying and graph look-ups: the lower bound of all methods."""
        batches = [self._step.prepare(tuple(self._source.batch(rows))) for rows in self._rows]
        weights, version = [tf.constant(w) for w in self._weights], tf.constant(1, tf.int64)

        def compute() -> np.ndarray:
            pairs = zip(weights, batches, strict=True)
            return np.stack([self._step._run(held, batch, version)[0] for held, batch in pairs])

        return compute

    def _together(self, function: Callable[..., tf.Tensor], *, jit: bool) -> Compute:
        inner = tf.function(tf.autograph.experimental.do_not_convert(function), jit_compile=jit)

        @tf.function(autograph=False)
        def gathered(weights: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
            return inner(weights, tf.gather(self._x, rows), tf.gather(self._y, rows))

        return lambda: np.asarray(gathered(tf.constant(np.stack(self._weights)), tf.constant(self._rows)))

    def _scanned(self, weights: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Run the user's own ``train_step`` in a loop inside one graph."""
        found = tf.TensorArray(tf.float32, WORKERS, element_shape=[self._layout.size])

        def one(k: tf.Tensor, found: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            gradient, _, logs, *_ = self._step._traced(weights[k], (x[k], y[k]), tf.constant(1, tf.int64))
            with tf.control_dependencies(list(logs.values())):
                return k + 1, found.write(k, gradient)

        return tf.while_loop(lambda k, _: k < WORKERS, one, (0, found), parallel_iterations=1)[1].stack()

    def _vectorised(self, weights: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        """Compute only the loss, without metrics and ``train_step``."""

        def one(arguments: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> tf.Tensor:
            held, images, labels = arguments
            with tf.GradientTape() as tape:
                tape.watch(held)
                trainable = [tf.reshape(held[s.start : s.stop], s.shape) for s in self._layout.slots]
                predicted, _ = self._model.stateless_call(trainable, [], images, training=True)
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, predicted))
            return tape.gradient(loss, held)

        return tf.vectorized_map(one, (weights, x, y))
