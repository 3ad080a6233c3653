"""Private parts of Keras 3: the only module that uses them, each with the behaviour that it relies on.

New releases of Keras are checked against this module. All other modules use only public names of Keras.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

# loss: Loss.__call__ looks reduce_weighted_values up in this module; apply_mask makes weights of a mask.
from keras.src.losses import loss as loss_module

# Functional: kind of a model that is a graph of layers; keras.Model(inputs, outputs) returns one.
from keras.src.models.functional import Functional

# inject_functional_model_class: puts Functional in the place of Model among the bases of a class and of its bases.
from keras.src.models.model import inject_functional_model_class

# map_graph: the nodes of a graph, which their operations' numbers identify.
from keras.src.ops.function import map_graph

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
    jax_sparse_to_tf_sparse,
    scipy_sparse_to_tf_sparse,
    unpack_x_y_sample_weight,
)
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

# tracking: containers that Keras substitutes for a layer's own, to track the variables in them.
from keras.src.utils import tracking

# DynamicBackend: a preprocessing layer's choice between the backend and TensorFlow's graphs.
from keras.src.utils.backend_utils import DynamicBackend

# Conversion of the results of metrics to numbers, as in the logs of callbacks.
from keras.src.utils.python_utils import pythonify_logs

# Decorator that removes frames of Keras from tracebacks, as fit() does.
from keras.src.utils.traceback_utils import filter_traceback

from nfdt.core.errors import UsageError

__all__ = [
    "Functional",
    "KerasSaveable",
    "filter_traceback",
    "is_tensorflow_ragged",
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

TORCH_OPTIMIZERS = "keras.src.backend.torch.optimizers."
"""Modules of the subclasses that Keras on PyTorch makes of its own optimizers, which have the same names."""

LAMBDA_METHOD = "_serialize_function_to_config"
"""Method of a Lambda layer that marshals Python functions, which loses their globals."""

CHECKPOINT_ATTRIBUTES = frozenset(
    f"_self_{name}"
    for name in (
        *("setattr_tracking", "update_uid", "name_based_restores", "saveable_object_factories"),
        *("unconditional_checkpoint_dependencies", "unconditional_dependency_names"),
        "unconditional_deferred_dependencies",
    )
)
"""Attributes that TensorFlow's ``Trackable`` and ``AutoTrackable`` give an object, and make again when needed."""


# ---- models


def flatten_layers(model: Any) -> list[Any]:
    """Return the model and all its nested layers: ``_flatten_layers`` lists outer layers first, in a stable order."""
    return list(model._flatten_layers())


def require_compiled(model: Any) -> None:
    """Raise the error of ``fit`` for a model that is not compiled: ``_assert_compile_called`` is fit's own check."""
    model._assert_compile_called("fit")


def compiled_arguments(model: Any) -> dict[str, Any]:
    """Return arguments of ``compile`` with which another model trains as this one, the optimizer left out.

    ``compile`` replaces ``_compile_loss`` and ``_compile_metrics`` only if it is given a loss, or metrics: those of
    earlier calls stay, while ``_compile_config`` records the last call alone. Metrics that are built keep what they
    have made of "accuracy" for the targets of their first batch.
    """
    loss, metrics = model._compile_loss, model._compile_metrics
    return {
        "loss": None if loss is None else loss._user_loss,
        "loss_weights": None if loss is None else loss._user_loss_weights,
        "metrics": None if metrics is None else _as_built(metrics, metrics._user_metrics, "_flat_metrics"),
        "weighted_metrics": None
        if metrics is None
        else _as_built(metrics, metrics._user_weighted_metrics, "_flat_weighted_metrics"),
        "run_eagerly": model.run_eagerly,
        "steps_per_execution": model.steps_per_execution,
        "jit_compile": model.jit_compile,
    }


def _as_built(metrics: Any, given: Any, attribute: str) -> Any:
    """Return the metrics of each output where "accuracy" was one of those given and has become one of its classes.

    ``_flat_metrics`` has one ``MetricsList`` per output, in an order that ``compile`` accepts where the outputs are a
    flat list or dictionary, which is where ``_resolved_output_names`` is set.
    """
    ambiguous = any(str(leaf).lower() in ("accuracy", "acc") for leaf in keras.tree.flatten(given or []))
    if not ambiguous or not metrics.built:
        return given
    found = [held and list(held.metrics) for held in getattr(metrics, attribute)]
    if len(found) == 1:
        return found[0]
    return found if metrics._resolved_output_names is not None else given


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


def own_variables(layer: Any) -> list[Any]:
    """Return the variables of a layer without those of its layers: ``_trainable_variables``, and those not trained."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def seed_generators(layer: Any) -> list[Any]:
    """Return the seed generators of a layer without those of its layers: ``_seed_generators``."""
    return list(layer._seed_generators)


def distribution_strategy(model: Any) -> Any:
    """Return the tf.distribute strategy that a model was made under: ``_distribute_strategy``, None without one."""
    return getattr(model, "_distribute_strategy", None)


def restored_epoch(model: Any) -> int | None:
    """Return the epoch to begin with: BackupAndRestore sets ``_initial_epoch`` on the model before training."""
    epoch: int | None = model._initial_epoch
    return epoch


def loss_spec(model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
    """Compute outputs and loss on shapes: ``backend.compute_output_spec`` runs a function symbolically.

    ``_compute_loss`` accepts the same arguments with and without ``training``. Only a scope that collects losses, which
    ``compute_output_spec`` does not open, keeps those of ``add_loss``.
    """
    from keras.src import backend

    def loss(x: Any, y: Any, sample_weight: Any) -> Any:
        with keras.StatelessScope(collect_losses=True):
            prediction = model(x, training=False)
            return model._compute_loss(x, y, prediction, sample_weight=sample_weight, training=False)

    return backend.compute_output_spec(loss, x, y, sample_weight)


def epoch_limit() -> int | None:
    """Return the limit of ``keras.config.set_max_epochs``: ``backend.config.max_epochs`` returns it."""
    from keras.src.backend import config

    limit: int | None = config.max_epochs()
    return limit


def limited_steps(steps: int | None) -> int | None:
    """Limit steps per epoch by ``keras.config.set_max_steps_per_epoch``: ``backend.config`` returns the limit."""
    from keras.src.backend import config

    limit = config.max_steps_per_epoch()
    return min(steps or limit, limit) if limit else steps


def limited_batches(steps: int | None, steps_per_execution: int) -> int | None:
    """Return how many batches an evaluation takes at most; Keras limits ``steps`` and ends with whole executions."""
    limit = limited_steps(steps)
    return -(-int(limit) // steps_per_execution) * steps_per_execution if limit else None


def compiles_torch(model: Any) -> bool:
    """Return whether Keras on PyTorch compiles the model's steps: ``_should_torch_compile`` reads ``jit_compile``."""
    return bool(model._should_torch_compile())


# ---- losses

ReductionObserver = Callable[..., Any]
"""Function of a reduced loss, the shape of what was reduced, its weights, its mask (or None), and its reduction."""

_OBSERVER: ContextVar[ReductionObserver | None] = ContextVar("reduction_observer", default=None)


def compiled_loss(model: Any) -> Any:
    """Return the object that computes the losses of ``compile``, by its method ``call``; None without a loss."""
    return getattr(model, "_compile_loss", None)


@contextmanager
def observed_reductions(observer: ReductionObserver) -> Iterator[None]:
    """Pass each loss that is reduced in the block, in this thread, to ``observer``, whose result replaces it.

    Relies on ``Loss.__call__``, which looks ``reduce_weighted_values`` up in its module; it is wrapped once for all.
    """
    if not hasattr(loss_module.reduce_weighted_values, "__wrapped__"):
        loss_module.reduce_weighted_values = _observed(loss_module.reduce_weighted_values)
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def _observed(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``reduce_weighted_values`` with its result passed through the observer of :func:`observed_reductions`."""

    @functools.wraps(reduce)
    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        result = reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
        observer = _OBSERVER.get()
        if observer is None:
            return result
        shape = values.shape if hasattr(values, "shape") else keras.ops.convert_to_tensor(values).shape
        return observer(result, shape, sample_weight, mask, reduction)

    return reduced


def sum_of_weights(sample_weight: Any, mask: Any, dtype: Any, reduction: str) -> Any:
    """Return the sum by which ``mean_with_sample_weight`` divides, with ``sample_weight``, ``mask`` or both."""
    given = None if sample_weight is None else keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
    return keras.ops.sum(loss_module.apply_mask(given, mask, dtype=dtype, reduction=reduction))


# ---- forward passes


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python, NumPy and Keras in the block, and restore them: Keras' attribute ``global_seed_generator``."""
    from keras.src.backend.common import global_state

    name = "global_seed_generator"
    held = (random.getstate(), np.random.get_state(), global_state.get_global_attribute(name))
    random.seed(seed)
    np.random.seed(seed)
    global_state.set_global_attribute(name, keras.random.SeedGenerator(seed))
    try:
        yield
    finally:
        random.setstate(held[0])
        np.random.set_state(held[1])
        global_state.set_global_attribute(name, held[2])


@contextmanager
def tensorflow_seeded(seed: int) -> Iterator[None]:
    """Seed TensorFlow in the block, and restore its generator: relies on ``_seed`` and ``_rng`` of its context."""
    from tensorflow.python.eager.context import context

    eager = context()
    held = {key: vars(eager).pop(key) for key in ("_seed", "_rng") if key in vars(eager)}
    eager._set_global_seed(seed)
    try:
        yield
    finally:
        del eager._seed, eager._rng
        vars(eager).update(held)


# ---- objects by value

SET_LATER = ("stop_training", "stop_evaluating", "stop_predicting", "history", "_initial_epoch", "_called")
"""Attributes of layers and models that Keras sets after their constructor."""

SET_BY_KERAS = ("build", "quantize", "loss")
"""Methods that Keras replaces on objects: ``Layer.__new__`` wraps two of them, ``compile`` sets ``Model.loss``."""

_OF_ONE_PROCESS: tuple[tuple[type, str, Callable[[], Any]], ...] = (
    (keras.Operation, "_outbound_nodes", list),
    (keras.Layer, "_losses", list),
    (keras.Layer, "_loss_ids", set),
    (keras.Model, "train_function", lambda: None),
    (keras.Model, "test_function", lambda: None),
    (keras.Model, "predict_function", lambda: None),
    (keras.Model, "_compile_config", lambda: None),
    (keras.layers.JaxLayer, "jax2tf_training_false_fn", lambda: None),
    (keras.layers.JaxLayer, "jax2tf_training_true_fn", lambda: None),
    (tracking.Tracker, "stored_ids", dict),
    (keras.Variable, "_value", lambda: None),
)


def attributes_of_one_process(obj: Any) -> dict[str, Any]:
    """Return the attributes that another process cannot have, with the values that they have there.

    They are compiled functions, tensors of the last call, the record of the last ``fit``, numbers of objects, a second
    copy of the arguments of ``compile``, the memory of a variable, PyTorch's record of a module's parameters
    (``_torch_params``), and the uses of a layer's outputs, also those in other models (``_outbound_nodes``).
    """
    found = {name: make() for cls, name, make in _OF_ONE_PROCESS if isinstance(obj, cls) and name in vars(obj)}
    if "torch" in sys.modules and isinstance(obj, sys.modules["torch"].nn.Module):  # as every layer on PyTorch
        found.update(vars(sys.modules["torch"].nn.Module()))
        found["_modules"] = {name: held for name, held in vars(obj)["_modules"].items() if name != "_torch_params"}
    records = [name for name, value in vars(obj).items() if isinstance(value, keras.callbacks.History)]
    return {**found, **dict.fromkeys(records)}


def is_checkpoint_attribute(name: str) -> bool:
    """Return whether TensorFlow keeps an attribute for its checkpoints; see :data:`CHECKPOINT_ATTRIBUTES`."""
    return name in CHECKPOINT_ATTRIBUTES


def is_built_by(obj: Any, method: Any) -> bool:
    """Return whether a method is the closure that ``Layer.__new__`` made for this object; ``__wrapped__`` is bound."""
    wrapped = getattr(method, "__wrapped__", None)
    return wrapped is not None and getattr(wrapped, "__self__", None) is obj


def make_functional(cls: type) -> None:
    """Give a class the bases that ``Model.__init__(inputs, outputs)`` gives the class of its object."""
    if not issubclass(cls, Functional):
        inject_functional_model_class(cls)


def blank_layer(cls: type) -> Any:
    """Return a layer without attributes: ``Layer.__new__`` wraps ``build`` and creates the tracker."""
    layer: Any = keras.Layer.__new__(cls)
    for name in [name for name in vars(layer) if name not in SET_BY_KERAS]:
        del vars(layer)[name]
    return layer


def initialize_variable(variable: Any, value: Any) -> None:
    """Give a variable that has all other attributes its value: ``_initialize`` creates the one of TensorFlow."""
    variable._initialize(value)


def renew(obj: Any) -> None:
    """Correct what an object holds of its process, once all objects have their attributes.

    These are numbers of other objects (a tracker's ``stored_ids``, a graph's ``_nodes``), and the functions that
    ``JaxLayer.build`` converts for TensorFlow, without new variables for a layer that has them.
    """
    if isinstance(obj, tracking.Tracker):
        obj.stored_ids = {name: {id(held) for held in store} for name, (_, store) in obj.config.items()}
    elif isinstance(obj, Functional):
        obj._nodes = map_graph(obj._inputs, obj._outputs)[0]
    elif isinstance(obj, keras.layers.JaxLayer) and obj.built and keras.backend.backend() == "tensorflow":
        keras.layers.JaxLayer.build(obj, obj.get_build_config()["input_shape"])


def unwrapped(obj: Any) -> Any:
    """Return the container that TensorFlow has wrapped to track a layer's attribute: ``__wrapped__``; else ``obj``."""
    from tensorflow.python.trackable import data_structures

    if isinstance(obj, data_structures.ListWrapper):
        return list(obj)
    wrappers = (data_structures._DictWrapper, data_structures._TupleWrapper)
    return obj.__wrapped__ if type(obj) in wrappers else obj


def table_default(table: Any) -> Any:
    """Return the value of absent keys of a lookup table of TensorFlow: ``_default_value``, whether mutable or not."""
    return table._default_value


def backend_choice(obj: Any) -> str | None:
    """Return the backend of a preprocessing layer's ``DynamicBackend``, which reads all attributes from it."""
    return str(obj.name) if type(obj) is DynamicBackend else None


# ---- optimizers


def optimized_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for: ``_trainable_variables`` is set by ``build``."""
    return list(optimizer._trainable_variables)


def public_class(optimizer: Any) -> type:
    """Return the class of an optimizer, or that from which Keras on PyTorch has made it: see ``TORCH_OPTIMIZERS``."""
    classes = type(optimizer).__mro__
    return next(cls for cls in classes if not f"{cls.__module__}.".startswith(TORCH_OPTIMIZERS))


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


def moving_averages(optimizer: Any) -> dict[int, float]:
    """Return the slots that are moving averages of gradients or of their squares, by ``id``, with their decay.

    Adam, AdamW and RMSprop hold averages of squares in ``_velocities``; see also :func:`momentums`.
    """
    decays = {"momentum": momentums(optimizer), "beta_1": momentums(optimizer)}
    decays |= dict.fromkeys(("beta_2", "rho"), getattr(optimizer, "_velocities", []))
    names = {"SGD": ["momentum"], "Adam": ["beta_1", "beta_2"], "AdamW": ["beta_1", "beta_2"], "RMSprop": ["rho"]}
    known = names.get(type(optimizer).__name__, []) if type(optimizer).__module__.startswith("keras.") else []
    return {id(v): float(getattr(optimizer, name)) for name in known for v in decays[name] if v is not None}


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

    def forget_first(self) -> None:
        """Let the next epoch read its first batch anew."""
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
    """Emit the warning of ``fit`` for an epoch whose data end early: ``_interrupted_warning`` of EpochIterator."""
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
    logs: dict[str, Any] = pythonify_logs(model.get_metrics_result())
    return logs


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
