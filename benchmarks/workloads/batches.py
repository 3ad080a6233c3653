"""Input for hand-written TensorFlow loops: shuffled batches, gathered one batch ahead of the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


def shuffled_batches(images: np.ndarray, labels: np.ndarray, batch: int) -> Any:
    """Return a dataset of full batches, reshuffled in each iteration.

    Rows are gathered by index, one batch at a time, as in Keras' own adapter of arrays.
    """
    x, y = tf.constant(images), tf.constant(labels)
    steps = len(images) // batch

    def order(_: Any) -> Any:
        rows = tf.random.shuffle(tf.range(len(images)))[: steps * batch]
        return tf.data.Dataset.from_tensor_slices(tf.reshape(rows, [steps, batch]))

    orders = tf.data.Dataset.range(1).flat_map(order)
    return orders.map(lambda rows: (tf.gather(x, rows), tf.gather(y, rows))).prefetch(tf.data.AUTOTUNE)
