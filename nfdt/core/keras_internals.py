"""Private parts of Keras 3: the only module that uses them, each with the behaviour that it relies on.

New releases of Keras are checked against this module. All other modules use only public names of Keras.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras

# Functional: kind of a model that is a graph of layers; keras.Model(inputs, outputs) returns one.
from keras.src.models.functional import Functional

# Serialisation calls these functions as attributes of their modules: a replacement there takes effect everywhere.
# ObjectSharingScope preserves the identity of an object that occurs twice. record_object_after_serialization and
# get_build_and_compile_config complete each configuration. GLOBAL_CUSTOM_NAMES maps registered classes to names.
from keras.src.saving import object_registration, serialization_lib

# Base of every object that has a configuration; it pickles itself as a .keras file, which loses custom objects.
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing

# Tests of one leaf, which do not import the libraries that they test for.
from keras.src.trainers.data_adapters.data_adapter_utils import (
    is_jax_sparse,
    is_scipy_sparse,
    is_tensorflow_ragged,
    is_tensorflow_sparse,
    unpack_x_y_sample_weight,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

# tracking: containers that Keras substitutes for a layer's own, to track the variables in them.
from keras.src.utils import tracking

# Decorator that removes frames of Keras from tracebacks, as fit() does.
from keras.src.utils.traceback_utils import filter_traceback

from nfdt.core.errors import UsageError

__all__ = [
    "Functional",
    "KerasSaveable",
    "filter_traceback",
    "is_scipy_sparse",
    "is_tensorflow_ragged",
    "is_tensorflow_sparse",
    "object_registration",
    "serialization_lib",
    "tracking",
]

RATE_METHOD = "_get_current_learning_rate"
"""Method of an optimizer through which schedules, functions and numbers all pass when it steps."""

CLIP_METHOD = "_clip_gradients"
"""Method of an optimizer that clips all gradients at once, before anything else is done with them."""

UPDATE_METHOD = "_backend_update_step"
"""Method of an optimizer that moves the variables; it gets gradients, variables and the learning rate."""

DECAY_METHOD = "_apply_weight_decay"
"""Method of an optimizer that applies decoupled weight decay to all variables, before they are moved."""

LAMBDA_METHOD = "_serialize_function_to_config"
"""Method of a Lambda layer that marshals Python functions, which loses their globals."""


# ---- models


def flatten_layers(model: Any) -> list[Any]:
    """Return the model and all its nested layers: ``_flatten_layers`` lists outer layers first, in a stable order."""
    return list(model._flatten_layers())


def require_compiled(model: Any) -> None:
    """Raise the error of ``fit`` for a model that is not compiled: ``_assert_compile_called`` is fit's own check."""
    model._assert_compile_called("fit")


def compile_arguments(model: Any) -> Any:
    """Return the arguments of ``Model.compile``: ``_compile_config`` records the innermost call."""
    return model._compile_config.config


def build_symbolically(model: Any, specs: Any) -> None:
    """Create variables from shapes: ``fit`` calls ``_symbolic_build`` before its first step."""
    model._symbolic_build(data_batch=specs)


def is_unbuilt_stack(layer: Any) -> bool:
    """Return whether a layer is a Sequential model without an input: ``_functional`` is None until it is built."""
    return isinstance(layer, keras.Sequential) and layer._functional is None


def stacked_layers(layer: Any) -> Any:
    """Return the members of a Sequential model: ``_layers`` gains an input layer in a build that fails."""
    return layer._layers


def set_stacked_layers(layer: Any, members: Any) -> None:
    """Replace the members of a Sequential model; see :func:`stacked_layers`."""
    layer._layers = members


def distribution_strategy(model: Any) -> Any:
    """Return the tf.distribute strategy that a model was made under: ``_distribute_strategy``, None without one."""
    return getattr(model, "_distribute_strategy", None)


def restored_epoch(model: Any) -> int | None:
    """Return the epoch to begin with: BackupAndRestore sets ``_initial_epoch`` on the model before training."""
    epoch: int | None = model._initial_epoch
    return epoch


def loss_spec(model: Any, x: Any, y: Any, prediction: Any, sample_weight: Any) -> Any:
    """Compute the loss on shapes: ``_compute_loss`` accepts the same arguments with and without ``training``."""
    from keras.src import backend

    arguments = {"sample_weight": sample_weight, "training": False}
    return backend.compute_output_spec(model._compute_loss, x, y, prediction, **arguments)


def output_spec(model: Any, x: Any) -> Any:
    """Compute a model's outputs on shapes: ``backend.compute_output_spec`` runs it symbolically."""
    from keras.src import backend

    return backend.compute_output_spec(model, x, training=False)


def epoch_limit() -> int | None:
    """Return the limit of ``keras.config.set_max_epochs``: ``backend.config.max_epochs`` returns it."""
    from keras.src.backend import config

    limit: int | None = config.max_epochs()
    return limit


# ---- optimizers


def optimized_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for: ``_trainable_variables`` is set by ``build``."""
    return list(optimizer._trainable_variables)


def uses_weight_decay(optimizer: Any, variable: Any) -> bool:
    """Return whether decay applies: ``exclude_from_weight_decay`` affects only ``_use_weight_decay``."""
    return bool(optimizer._use_weight_decay(variable))


def set_weight_decay_use(optimizer: Any, variables: Sequence[Any], uses: Sequence[Any]) -> None:
    """Set for each variable whether decay applies: ``apply`` calls ``_use_weight_decay`` of the instance."""
    key = optimizer._var_key
    known = {key(variable): bool(use) for variable, use in zip(variables, uses, strict=True)}
    object.__setattr__(optimizer, "_use_weight_decay", lambda variable: known[key(variable)])


def variable_key(optimizer: Any, variable: Any) -> Any:
    """Return the key of a variable: ``_var_key`` is the same for all of its aliases."""
    return optimizer._var_key(variable)


def raw_learning_rate(optimizer: Any) -> Any:
    """Return the stored rate: ``_learning_rate`` is a variable, schedule or function; its getter evaluates these."""
    return getattr(optimizer, "_learning_rate", None)


def has_fixed_learning_rate(optimizer: Any) -> bool:
    """Return whether the rate is a plain number that may be replaced; see :func:`raw_learning_rate`."""
    return isinstance(raw_learning_rate(optimizer), keras.Variable)


def learning_rate_method(optimizer: Any) -> Callable[[], Any]:
    """Return the method with which an optimizer's step reads its rate; see :data:`RATE_METHOD`."""
    method: Callable[[], Any] = getattr(optimizer, RATE_METHOD)
    return method


def replace_learning_rate_method(optimizer: Any, method: Callable[[], Any]) -> None:
    """Replace :func:`learning_rate_method` on one optimizer."""
    object.__setattr__(optimizer, RATE_METHOD, method)


def own_iterations(optimizer: Any) -> Any:
    """Return the counter of applied updates: ``_iterations`` counts them also where gradients are accumulated."""
    return optimizer._iterations


def momentums(optimizer: Any) -> list[Any]:
    """Return the momentum variables: ``_momentums`` in older releases, ``momentums`` in newer ones."""
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", [])
    return [variable for variable in found if variable is not None]


def set_path(variable: Any, path: str) -> None:
    """Set a variable's path, which its name cannot contain: ``Variable.path`` returns ``_path``."""
    variable._path = path


def clipped(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Clip all gradients as the optimizer does; see :data:`CLIP_METHOD`."""
    return list(getattr(optimizer, CLIP_METHOD)(gradients))


# ---- metrics and callbacks


def is_built_metric(metric: Any) -> bool:
    """Return whether a metric has its variables: F1Score, R2Score and AUC clear ``_built`` until their first update."""
    return bool(getattr(metric, "_built", True))


def is_default_hook(method: Any) -> bool:
    """Return whether a callback's hook is empty: Keras marks its own empty hooks with ``_is_default``."""
    return bool(getattr(method, "_is_default", False))


def progress_bar(callbacks: Any) -> Any:
    """Return the bar of a CallbackList, or None: ``_progbar`` is its ProgbarLogger."""
    return getattr(getattr(callbacks, "_progbar", None), "progbar", None)


def batches_seen(saver: Any, default: int) -> int:
    """Return the batches since the last save: ModelCheckpoint counts them in ``_batches_seen_since_last_saving``."""
    return int(getattr(saver, "_batches_seen_since_last_saving", default))


def back_up(saver: Any, epoch: int) -> None:
    """Save the model within an epoch: BackupAndRestore's ``_save_model`` writes ``_current_epoch``, to begin with."""
    saver._current_epoch = max(saver._current_epoch, epoch)
    saver._save_model()


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


def can_be_sliced(pytree: Any) -> bool:
    """Return whether Keras reads the data as arrays: ``can_convert_arrays`` selects its ArrayDataAdapter."""
    return bool(array_data_adapter.can_convert_arrays(pytree))


def sliced_array(leaf: Any) -> Any:
    """Return a leaf in the form of its batches: ``convert_to_sliceable`` casts float64 to floatx, pandas, strings."""
    sliceable = array_slicing.convert_to_sliceable(leaf, target_backend="numpy")
    return sliceable.convert_to_numpy(sliceable.array)


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
    standardize: Callable[[Any], Any] = PyDatasetAdapter(dataset, class_weight)._standardize_batch
    return standardize


def tensorflow_dataset(iterator: Any) -> Any:
    """Return the dataset that an iterator reads, with the class weights of ``fit``; None for other data.

    Relies on ``_dataset`` of TFDatasetAdapter.
    """
    adapter = iterator.data_adapter
    return adapter._dataset if isinstance(adapter, TFDatasetAdapter) else None


class ReplayingIterator(EpochIterator):
    """Keras' iterator over NumPy batches; ``peek`` reads the first batch without losing it.

    Relies on ``_get_iterator``, which EpochIterator calls once per epoch, and on ``_standardize_batch``, which
    PyDatasetAdapter applies to each batch of a PyDataset.
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

    def _get_iterator(self) -> Any:
        peeked, self._peeked = self._peeked, None
        return super()._get_iterator() if peeked is None else peeked


# ---- evaluation


def evaluation_iterator(**options: Any) -> Any:
    """Return the iterator that ``evaluate`` makes of its data: TFEpochIterator."""
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    return TFEpochIterator(**options)


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
