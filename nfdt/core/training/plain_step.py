"""Steps of Keras' own ``fit``, without NFDT, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.program.batch_tensors import as_tensors


def plain_step(model: Any, batch: Any) -> Callable[[], None]:
    """Return a function that trains a model for one step and waits for its end, as ``fit`` does on TensorFlow.

    Args:
        model: A compiled, built model.
        batch: A pytree of arrays as ``train_step`` takes it.
    """
    tensors = as_tensors(batch)
    if isinstance(tensors, tuple):  # without weights of samples, where there are none
        tensors = tuple(part for part in tensors if part is not None)
    batches = iter(tf.data.Dataset.from_tensors(tensors).repeat())
    model.make_train_function()
    train = model.train_function

    def step() -> None:
        for value in train(batches).values():
            np.asarray(value)  # waits

    return step
