"""Batches of arrays as tensors: dense, sparse or ragged, as the model's own steps expect them."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from nfdt.core.arrays.composite import RaggedArray, SparseArray


def to_tensor(leaf: Any) -> Any:
    """Return an array as a ``tf.Tensor``, ``tf.SparseTensor`` or ``tf.RaggedTensor``."""
    if isinstance(leaf, SparseArray):
        return tf.SparseTensor(leaf.indices, leaf.values, leaf.shape)
    if isinstance(leaf, RaggedArray):
        return tf.RaggedTensor.from_nested_row_splits(leaf.values, leaf.splits)
    return tf.convert_to_tensor(leaf)


def as_tensors(batch: Any) -> Any:
    """Return the pytree with tensors at its leaves; None stays None."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else to_tensor(leaf), batch)
