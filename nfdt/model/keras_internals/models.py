"""Private parts of Keras 3 in models and in the objects that they consist of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

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

# tracking: containers that Keras substitutes for a layer's own, to track the variables in them.
from keras.src.utils import tracking

# DynamicBackend: a preprocessing layer's choice between the backend and TensorFlow's graphs.
from keras.src.utils.backend_utils import DynamicBackend

__all__ = ["Functional", "KerasSaveable", "object_registration", "serialization_lib", "tracking"]

LAMBDA_METHOD = "_serialize_function_to_config"
"""Method of a Lambda layer that marshals Python functions, which loses their globals."""

CHECKPOINT_ATTRIBUTES = (
    *("_self_setattr_tracking", "_self_update_uid", "_self_name_based_restores", "_self_saveable_object_factories"),
    *("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names"),
    "_self_unconditional_deferred_dependencies",
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


def making_variables(model: Any) -> AbstractContextManager[object]:
    """Return the scope in which variables of a model and its optimizer are made: that of its strategy, if any."""
    strategy = distribution_strategy(model)
    return nullcontext() if strategy is None else strategy.scope()


def is_mirrored(strategy: Any) -> bool:
    """Return whether a tf.distribute strategy divides batches among devices of one machine: MirroredStrategy."""
    import tensorflow as tf

    return isinstance(strategy, tf.distribute.MirroredStrategy)


def restored_epoch(model: Any) -> int | None:
    """Return the epoch to begin with: BackupAndRestore sets ``_initial_epoch`` on the model before training."""
    return model._initial_epoch


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

    return config.max_epochs()


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
    (keras.Model, "_distribute_strategy", lambda: None),
    (keras.layers.JaxLayer, "jax2tf_training_false_fn", lambda: None),
    (keras.layers.JaxLayer, "jax2tf_training_true_fn", lambda: None),
    (tracking.Tracker, "stored_ids", dict),
    (keras.Variable, "_value", lambda: None),
    (keras.Variable, "_layout", lambda: None),
)


def attributes_of_one_process(obj: Any) -> dict[str, Any]:
    """Return the attributes that another process cannot have, with the values that they have there.

    They are compiled functions, tensors of the last call, the record of the last ``fit``, numbers of objects, a second
    copy of the arguments of ``compile``, the memory of a variable and places on devices, PyTorch's record of a module's
    parameters (``_torch_params``), and the uses of a layer's outputs, also those in other models
    (``_outbound_nodes``).
    """
    found = {name: make() for cls, name, make in _OF_ONE_PROCESS if isinstance(obj, cls) and name in vars(obj)}
    if "torch" in sys.modules and isinstance(obj, sys.modules["torch"].nn.Module):  # as every layer on PyTorch
        found.update(vars(sys.modules["torch"].nn.Module()))
        found["_modules"] = {name: held for name, held in vars(obj)["_modules"].items() if name != "_torch_params"}
    records = [name for name, value in vars(obj).items() if isinstance(value, keras.callbacks.History)]
    return {**found, **dict.fromkeys(records)}


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


def initialize_zeros(variable: Any, shape: tuple[int, ...], dtype: str) -> None:
    """Give a variable that has all other attributes zeros, or no rows within :func:`without_rows`."""
    if tuple(shape) in _rowless:
        _initialize_without_rows(variable)
    else:
        variable._initialize(keras.ops.zeros(shape, dtype))


def layout_of(variable: Any) -> Any:
    """Return how a distribution of Keras divides a variable: ``_layout``, None without a distribution."""
    return variable._layout


def layouts_of(distribution: Any) -> list[tuple[str, Any]]:
    """Return the expressions and layouts of a ModelParallel: ``_layout_map``."""
    return list(distribution._layout_map.items())


def set_layout(variable: Any, layout: Any) -> None:
    """Divide a variable in another way; its next value is divided so: ``_layout``."""
    variable._layout = layout


_rowless: set[tuple[int, ...]] = set()


@contextmanager
def without_rows(shapes: Collection[tuple[int, ...]]) -> Iterator[None]:
    """Give variables of TensorFlow that are made in the block, of these shapes of rank 2, the memory of one row.

    Their ``shape`` is that of the whole variable: ``_initialize`` creates the one of TensorFlow, for any number of
    rows, and ``_shape`` is what Keras says.
    """
    cls, held, outer = keras.Variable, keras.Variable._initialize, set(_rowless)

    def initialize(variable: Any, value: Any) -> None:
        if variable._shape is not None and tuple(variable._shape) in _rowless:
            _initialize_without_rows(variable)
        else:
            held(variable, value)

    _rowless.update(shapes)
    if shapes:
        cls._initialize = initialize
    try:
        yield
    finally:
        cls._initialize = held
        _rowless.clear()
        _rowless.update(outer)


def _initialize_without_rows(variable: Any) -> None:
    """Create the variable of TensorFlow with one row; Keras reads it as ``_value``, and its shape as ``_shape``."""
    import tensorflow as tf

    value = tf.zeros([1, variable._shape[1]], variable._dtype)  # one row, for calls with a batch of zeros
    variable._value = tf.Variable(value, shape=[None, variable._shape[1]], name=variable.name)


def has_no_rows(variable: Any) -> bool:
    """Return whether a variable was made within :func:`without_rows`."""
    if keras.backend.backend() != "tensorflow" or not isinstance(variable, keras.Variable) or len(variable.shape) != 2:
        return False
    return variable.value.shape[0] is None


def is_symbolic() -> bool:
    """Return whether Keras runs code for shapes alone: ``in_symbolic_scope``."""
    from keras.src.backend.common.symbolic_scope import in_symbolic_scope

    return bool(in_symbolic_scope())


def renew(obj: Any) -> None:
    """Update what depends on the process, once all objects have their attributes.

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
