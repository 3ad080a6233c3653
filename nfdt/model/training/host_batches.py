"""Conversion of batches from the user's iterators and datasets to arrays on the host: dense, sparse or ragged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nfdt.core.arrays.composite import RaggedArray, SparseArray
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
    """Convert one batch of the user's iterator to arrays on the host and check it.

    Raises:
        CaptureError: a leaf that is no array with a batch dimension, or leaves of different lengths.
    """
    pytree = map_arrays(as_host_array, batch)
    shapes = [leaf.shape for leaf in leaves(pytree)]
    if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise CaptureError(
            f"Batch of the data iterator: expected arrays with the same number of rows. Received shapes: {shapes}."
        )
    return pytree


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch."""
    return int(leaves(batch)[0].shape[0])


def as_host_array(leaf: Any) -> np.ndarray[Any, Any] | SparseArray | RaggedArray:
    """Return a leaf as an array on the host; sparse and ragged ones stay what they are."""
    from nfdt.model.keras_internals import data as keras_data

    if keras_data.is_tensorflow_ragged(leaf):
        return RaggedArray(_values(leaf.flat_values), tuple(map(np.asarray, leaf.nested_row_splits)))
    if keras_data.is_sparse_leaf(leaf):
        tensor = keras_data.sparse_tensor(leaf)
        return SparseArray(
            np.asarray(tensor.indices), _values(tensor.values), tuple(np.asarray(tensor.dense_shape).tolist())
        )
    return np.asarray(leaf)


def _values(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor as an array; texts have a fixed width, also if there are none."""
    values = np.asarray(tensor)
    return values.astype(np.bytes_) if values.dtype == object else values


def is_composite(pytree: Any) -> bool:
    """Return whether any leaf is a sparse or ragged tensor or array of any library."""
    from nfdt.model.keras_internals import data as keras_data

    return any(keras_data.is_composite_leaf(leaf) for leaf in leaves(pytree))
