"""Private parts of Keras 3 in data and in evaluation."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing

# Tests of one leaf, which do not import the libraries that they test for.
from keras.src.trainers.data_adapters.data_adapter_utils import (
    is_jax_sparse,
    is_scipy_sparse,
    is_tensorflow_ragged,
    is_tensorflow_sparse,
    jax_sparse_to_tf_sparse,
    scipy_sparse_to_tf_sparse,
    unpack_x_y_sample_weight,
)
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

# Conversion of the results of metrics to numbers, as in the logs of callbacks.
from keras.src.utils.python_utils import pythonify_logs

from nfdt.core.errors import UsageError

__all__ = ["is_tensorflow_ragged"]

# ---- data


def split_off_validation(data: tuple[Any, Any, Any], share: float) -> tuple[Any, Any]:
    """Split data as ``validation_split`` does: ``train_validation_split`` returns training and validation data."""
    training, validation = array_slicing.train_validation_split(data, validation_split=share)
    return training, validation


def unpack_batch(data: Any) -> tuple[Any, Any, Any]:
    """Return (x, y, sample_weight): ``unpack_x_y_sample_weight`` reads tuples and lists of one to three members."""
    x, y, sample_weight = unpack_x_y_sample_weight(data)
    return x, y, sample_weight


def is_sparse_leaf(leaf: Any) -> bool:
    """Return whether a leaf is a sparse tensor or array of any library."""
    return is_tensorflow_sparse(leaf) or is_scipy_sparse(leaf) or bool(is_jax_sparse(leaf))


def is_composite_leaf(leaf: Any) -> bool:
    """Return whether a leaf is a ragged tensor, or sparse."""
    return bool(is_tensorflow_ragged(leaf)) or is_sparse_leaf(leaf)


def sparse_tensor(leaf: Any) -> Any:
    """Return a sparse leaf as the ``tf.SparseTensor`` that Keras' adapters make of it."""
    if is_scipy_sparse(leaf):
        return scipy_sparse_to_tf_sparse(leaf)
    return jax_sparse_to_tf_sparse(leaf) if is_jax_sparse(leaf) else leaf


def can_be_sliced(pytree: Any) -> bool:
    """Return whether Keras reads the data as arrays: ``can_convert_arrays`` selects its ArrayDataAdapter."""
    return bool(array_data_adapter.can_convert_arrays(pytree))


def sliced_array(leaf: Any) -> Any:
    """Return a leaf in the form of its batches: ``convert_to_sliceable`` casts float64 to floatx, pandas, strings."""
    sliceable = array_slicing.convert_to_sliceable(leaf, target_backend="numpy")
    return sliceable.convert_to_numpy(sliceable.array)


def shuffle_seed() -> int | None:
    """Return the seed with which Keras shuffles arrays now; None without ``keras.utils.set_random_seed`` or the like.

    None on JAX, where Keras draws the orders of all passes from NumPy's global generator, and between them whatever
    else draws from it.

    ArrayDataAdapter calls ``tf.random.shuffle`` in a graph of its own, whose first seed this is.

    Raises:
        RuntimeError: operations have to be deterministic, and no seed is set.
    """
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    seeds: list[int | None] = []
    tf.function(lambda: seeds.extend(tf.compat.v1.random.get_seed(None)), autograph=False).get_concrete_function()
    return seeds[0]


def array_inputs(iterator: Any) -> tuple[Any, int, int] | None:
    """Return inputs, samples and batch size of an iterator over arrays, else None.

    Relies on ``_inputs`` and ``_num_samples`` of ArrayDataAdapter.
    """
    adapter = iterator.data_adapter
    if not isinstance(adapter, array_data_adapter.ArrayDataAdapter):
        return None
    return adapter._inputs, int(adapter._num_samples), int(adapter.batch_size)


def batch_standardizer(dataset: Any, class_weight: Any) -> Callable[[Any], Any]:
    """Return the function that PyDatasetAdapter applies to each batch of a PyDataset: ``_standardize_batch``."""
    return PyDatasetAdapter(dataset, class_weight)._standardize_batch


def tensorflow_dataset(iterator: Any) -> Any:
    """Return the dataset that an iterator reads, with the class weights of ``fit``; None for other data.

    Relies on ``_dataset`` of TFDatasetAdapter.
    """
    adapter = iterator.data_adapter
    return adapter._dataset if isinstance(adapter, TFDatasetAdapter) else None


class ReplayingIterator(EpochIterator):
    """Keras' iterator over NumPy batches; ``peek`` reads the first batch without losing it.

    Batches of arrays or datasets with sparse or ragged parts are tensors, because Keras makes NumPy batches dense.

    Relies on ``_get_iterator``, which EpochIterator calls once per epoch, on ``_epoch_iterator``, which yields the
    executions of an epoch, on ``get_tf_dataset`` of the adapters, and on ``_standardize_batch``, which PyDatasetAdapter
    applies to each batch of a PyDataset.
    """

    _peeked: Any = None

    def peek(self) -> Any:
        """Return the first batch.

        Raises:
            UsageError: the iterator is empty.
        """
        if isinstance(self.data_adapter, PyDatasetAdapter):  # by index, as Keras does for its signature
            return self.data_adapter._standardize_batch(self.data_adapter.py_dataset[0])
        iterator = iter(self._get_iterator())
        try:
            first = next(iterator)
        except StopIteration:
            raise UsageError("Training data: expected at least one batch. Received: an empty iterator.") from None
        self._peeked = itertools.chain([first], iterator)
        return first

    def rewind(self) -> None:
        """Let the next epoch read its first batch again, instead of the one that :meth:`peek` has read."""
        self._peeked = None

    def __next__(self) -> Any:
        """Return the first step, the last step and the batches of the next execution.

        As with TFEpochIterator, the last execution may have fewer batches; one without batches ends the epoch.
        """
        first, last, iterator = next(self._epoch_iterator)
        batches = list(itertools.islice(iterator, self.steps_per_execution))
        if not batches:
            with self.catch_stop_iteration():
                raise StopIteration
            raise StopIteration
        return first, last, batches

    def _get_iterator(self) -> Any:
        peeked, self._peeked = self._peeked, None
        if peeked is not None:
            return peeked
        return self.data_adapter.get_tf_dataset() if self._has_composites() else super()._get_iterator()

    def _has_composites(self) -> bool:
        """Return whether arrays or a dataset have sparse or ragged parts: ``_inputs`` and ``_dataset`` of adapters."""
        adapter = self.data_adapter
        if isinstance(adapter, TFDatasetAdapter):
            specs = keras.tree.flatten(adapter._dataset.element_spec)
            return any(type(spec).__name__ in ("SparseTensorSpec", "RaggedTensorSpec") for spec in specs)
        arrays = adapter._inputs if isinstance(adapter, array_data_adapter.ArrayDataAdapter) else ()
        return any(map(is_composite_leaf, keras.tree.flatten(arrays)))


def warn_of_missing_data() -> None:
    """Emit the warning of ``fit`` that the data of an epoch ended early: ``_interrupted_warning`` of EpochIterator."""
    EpochIterator._interrupted_warning(None)


def is_read_once(iterator: EpochIterator) -> bool:
    """Whether the data come from a generator, which cannot begin again."""
    return isinstance(iterator.data_adapter, GeneratorDataAdapter)


def dataset_variables(dataset: Any) -> list[Any]:
    """Return the variables that a ``tf.data.Dataset`` reads, also those of the datasets that it is made of.

    Relies on ``_functions`` and ``_inputs`` of ``tf.data.Dataset``.
    """
    own = {id(v): v for function in dataset._functions() for v in function.function.graph.variables}
    return [*own.values(), *(variable for source in dataset._inputs() for variable in dataset_variables(source))]


# ---- evaluation


def evaluation_iterator(**options: Any) -> Any:
    """Return the iterator that ``evaluate`` makes of its data: TFEpochIterator and the like.

    The trainer of a backend, ``keras.src.backend.NAME.trainer``, defines one subclass of EpochIterator.
    """
    trainer = importlib.import_module(f"keras.src.backend.{keras.backend.backend()}.trainer")
    (own,) = (kind for kind in vars(trainer).values() if isinstance(kind, type) and EpochIterator in kind.__bases__)
    return own(**options)


def evaluation_logs(model: Any) -> dict[str, Any]:
    """Return the logs of ``evaluate`` from the metrics: ``pythonify_logs`` converts the results to numbers."""
    return pythonify_logs(model.get_metrics_result())


def flattened_logs(model: Any, logs: dict[str, Any]) -> Any:
    """Return logs as ``evaluate`` does without ``return_dict``: ``_flatten_metrics_in_order`` orders them."""
    return model._flatten_metrics_in_order(logs)


def is_due(model: Any, epoch: int, frequency: Any) -> bool:
    """Return whether ``fit`` would evaluate after an epoch: ``_should_eval`` reads ``validation_freq``."""
    return bool(model._should_eval(epoch, frequency))


def evaluate_with(model: Any, iterator: Any, **arguments: Any) -> Any:
    """Evaluate as ``fit`` does, with one iterator for all epochs: ``evaluate`` reads ``_eval_epoch_iterator``."""
    model._eval_epoch_iterator = iterator
    try:
        return model.evaluate(**arguments, return_dict=True, _use_cached_eval_dataset=True)
    finally:
        del model._eval_epoch_iterator
