"""Batches of the user's own iterators and datasets as pytrees of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nfdt.core.errors import CaptureError


def map_arrays(function: Callable[[Any], Any], pytree: Any) -> Any:
    """Apply ``function`` to the leaves of a pytree; None stays None, lists become tuples (as Keras' pipeline does)."""
    from keras import tree

    return tree.lists_to_tuples(tree.map_structure(lambda leaf: None if leaf is None else function(leaf), pytree))


def leaves(pytree: Any) -> list[Any]:
    """Return the leaves of a pytree that are not None."""
    from keras import tree

    return [leaf for leaf in tree.flatten(pytree) if leaf is not None]


def as_batch(batch: Any) -> Any:
    """Convert one batch of the user's iterator to NumPy arrays and check it.

    Raises:
        CaptureError: a leaf that is no array with a batch dimension, or leaves of different lengths.
    """
    pytree = map_arrays(dense_array, batch)
    shapes = [leaf.shape for leaf in leaves(pytree)]
    if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise CaptureError(
            f"Batch of the data iterator: expected arrays with the same number of rows. Received shapes: {shapes}."
        )
    return pytree


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch."""
    return int(leaves(batch)[0].shape[0])


def dense_array(leaf: Any) -> np.ndarray[Any, Any]:
    """Return a leaf as an array; a sparse one becomes dense."""
    from nfdt.core import keras_internals

    refuse_ragged(leaf)
    if keras_internals.is_tensorflow_sparse(leaf):
        import tensorflow as tf

        leaf = tf.sparse.to_dense(leaf)
    elif keras_internals.is_scipy_sparse(leaf):
        leaf = leaf.todense()
    return np.asarray(leaf)


def refuse_ragged(pytree: Any) -> None:
    """Raise CaptureError for ragged tensors, which cannot become arrays."""
    from nfdt.core import keras_internals

    if any(keras_internals.is_tensorflow_ragged(leaf) for leaf in leaves(pytree)):
        raise CaptureError(
            "Data: expected dense arrays. Received: a RaggedTensor. Convert it with .to_tensor() and mask the padding."
        )
