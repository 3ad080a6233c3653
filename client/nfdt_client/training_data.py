"""Data of ``fit``, read with Keras' own adapters: whole arrays, or a stream of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nfdt.core.errors import CaptureError, UsageError


@dataclass(frozen=True)
class Arrays:
    """All samples: a pytree of NumPy arrays of ``samples`` rows, in the structure that ``train_step`` sees."""

    pytree: Any
    samples: int
    batch_size: int

    @property
    def batches(self) -> int:
        """Number of batches of one pass, the last one possibly short."""
        return -(-self.samples // self.batch_size)

    def head(self, rows: int) -> Arrays:
        """Return the first ``rows`` rows."""
        return Arrays(map_arrays(lambda a: a[:rows], self.pytree), min(rows, self.samples), self.batch_size)


class Stream:
    """Batches that only the client can make; Keras' own epoch iterator yields those of an epoch.

    Args:
        iterator: A Keras ``EpochIterator`` over the user's object.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        iterator.reset()

    @property
    def batches(self) -> int | None:
        """Number of batches per epoch; None if unknown."""
        count = self._iterator.num_batches
        return int(count) if count else None

    def peek(self) -> Any:
        """Return the first batch; the first epoch yields it again."""
        batch = self._iterator.peek()
        return as_batch(batch)

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of the next epoch as pytrees of NumPy arrays."""
        for _, _, buffer in self._iterator:
            yield from map(as_batch, buffer)


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
    pytree = map_arrays(_as_array, batch)
    shapes = [leaf.shape for leaf in leaves(pytree)]
    if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise CaptureError(
            f"Batch of the data iterator: expected arrays with the same number of rows. Received shapes: {shapes}."
        )
    return pytree


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch."""
    return int(leaves(batch)[0].shape[0])


def _as_array(leaf: Any) -> np.ndarray[Any, Any]:
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


def is_sparse(pytree: Any) -> bool:
    """Whether any leaf is a sparse matrix or tensor; such batches are made dense one by one."""
    from nfdt.core import keras_internals

    return any(keras_internals.is_sparse_leaf(leaf) for leaf in leaves(pytree))


def read(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Arrays | Stream:
    """Read the training data as Keras does.

    Args:
        x: As for ``fit``.
        y: As for ``fit``.
        sample_weight: As for ``fit``.
        **options: ``batch_size``, ``steps_per_epoch``, ``shuffle`` and ``class_weight`` of ``fit``.

    Raises:
        UsageError: no data, or data that Keras' adapters refuse (lengths that differ, unknown types, ...).
        CaptureError: ragged tensors.
    """
    from nfdt.core import keras_internals

    check_not_empty(x, y, sample_weight)
    refuse_ragged((x, y, sample_weight))
    try:
        iterator = keras_internals.ReplayingIterator(x, y, sample_weight, **options)
    except ValueError as error:
        raise UsageError(f"Training data: {error}") from error
    arrays = keras_internals.array_inputs(iterator)
    if arrays is None or is_sparse((x, y, sample_weight)):
        return Stream(iterator)
    inputs, samples, batch_size = arrays
    return Arrays(_whole(inputs), samples, batch_size)


def check_not_empty(x: Any, y: Any, sample_weight: Any) -> None:
    """Raise UsageError if there is no sample to train on."""
    if x is None:
        raise UsageError("Training data: expected x. Received: None.")
    for name, part in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        if not isinstance(part, np.ndarray | list | tuple | dict) and not hasattr(part, "shape"):
            continue
        for leaf in leaves(part):
            shape = getattr(leaf, "shape", None)
            if shape is not None and len(shape) and shape[0] == 0:
                raise UsageError(f"Data: expected at least one sample. Received: {name} of shape {tuple(shape)}.")


def is_arrays(pytree: Any) -> bool:
    """Whether these are dense arrays that can go with a job."""
    from nfdt.core import keras_internals

    ragged = any(keras_internals.is_tensorflow_ragged(leaf) for leaf in leaves(pytree))
    return keras_internals.can_be_sliced(pytree) and not is_sparse(pytree) and not ragged


def _whole(inputs: Any) -> Any:
    """Convert the adapter's inputs to NumPy arrays as it converts batches (float64 to floatx, pandas, strings)."""
    from nfdt.core import keras_internals

    return map_arrays(lambda leaf: _as_array(keras_internals.sliced_array(leaf)), inputs)
