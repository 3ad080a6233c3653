"""Description of the user's optimizer for the shards: its configuration and the owner of each of its variables."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras

from nfdt.core.errors import CaptureError
from nfdt.model.keras_internals.models import flatten_layers, has_no_rows, serialization_lib, without_rows
from nfdt.model.keras_internals.training import optimized_variables, public_class, uses_weight_decay
from nfdt.model.program.described import is_plain
from nfdt.model.program.manifest import OptimizerEntries

GLOBAL = -1

# Names of the model's optimizer in a pickle, and of the one within it where the loss is scaled.
OPTIMIZER, INNER_OPTIMIZER = "optimizer", "inner optimizer"

_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")


def inner_optimizer(model: Any) -> Any:
    """Return the optimizer that updates the weights, without the loss scaling that Keras adds for float16."""
    return unscaled(model.optimizer)


def unscaled(optimizer: Any) -> Any:
    """Return an optimizer without the loss scaling that Keras adds for float16."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def is_divided(optimizer: Any) -> bool:
    """Return whether an optimizer gives each variable to one of several others: ``keras.optimizers.MultiOptimizer``."""
    return isinstance(unscaled(optimizer), getattr(keras.optimizers, "MultiOptimizer", ()))


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Return an optimizer without loss scaling, and the others among which it divides the variables."""
    inner = unscaled(optimizer)
    return [inner, *inner.optimizers] if is_divided(inner) else [inner]


def loss_scale(model: Any) -> dict[str, Any] | None:
    """Return the dynamic loss scale to start from, or None where there is none."""
    optimizer = model.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
    return {
        "initial_scale": float(keras.ops.convert_to_numpy(scale)),
        "dynamic_growth_steps": int(optimizer.dynamic_growth_steps),
    }


def own_optimizers(model: Any) -> list[Any]:
    """Return the Keras optimizers of a model, each once: ``model.optimizer``, then those in attributes, by name.

    Attributes of its layers count as well, and the members of lists, tuples and dictionaries.
    """
    held = [vars(layer)[name] for layer in flatten_layers(model) for name in sorted(vars(layer))]
    found: dict[int, Any] = {}
    for value in [model.optimizer, *held]:
        members = value.values() if isinstance(value, Mapping) else value
        for member in members if isinstance(value, Mapping | list | tuple) else [value]:
            if isinstance(member, keras.optimizers.Optimizer):
                found.setdefault(id(member), member)
    return list(found.values())


def require_optimizer(model: Any) -> None:
    """Raise CaptureError unless the model was compiled with a Keras optimizer."""
    if not isinstance(model.optimizer, keras.optimizers.Optimizer):
        raise CaptureError(
            f"{_name(model)}: expected one Keras optimizer in compile(). Received: {type(model.optimizer).__name__}."
        )


def _name(model: Any) -> str:
    return f"{type(model).__name__} {model.name!r}"


def state_bytes(model: Any) -> int:
    """Return the bytes of a built model's weights, trained or not, and of its optimizer's variables, all as float32.

    The optimizer's variables, if they do not exist yet, are not created: they may take more memory than the model.
    """
    others = 4 * sum(math.prod(v.shape) for v in model.non_trainable_weights)
    return trained_bytes(model, model.trainable_variables) + others


def trained_bytes(model: Any, variables: Sequence[Any]) -> int:
    """Return the bytes of some of a built model's variables and of its optimizer's variables for them, as float32."""
    optimizers = [each for each in optimizer_parts(model.optimizer) if isinstance(each, keras.optimizers.Optimizer)]
    weights = 4 * sum(math.prod(v.shape) for v in variables)
    return round(weights * (1 + max(map(_vectors_of, optimizers), default=0.0)))


def _vectors_of(optimizer: Any) -> float:
    """Return the number of elements that an optimizer keeps for each element of a variable."""
    if is_divided(optimizer):
        return 0.0
    equal, tiny = type(optimizer).from_config(optimizer.get_config()), keras.Variable([[0.0, 0.0], [0.0, 0.0]])
    equal.build([tiny])
    return sum(math.prod(v.shape) for v in equal.variables if len(v.shape)) / math.prod(tiny.shape)


def build_optimizer_variables(model: Any) -> None:
    """Create the optimizer's variables for the model's trainable variables, unless they exist.

    Raises:
        CaptureError: they were created for other variables (layers were frozen or unfrozen after ``compile``), or a
            variable is overwritten with its gradient (float8 training).
    """
    trainable = model.trainable_variables
    optimizer, inner = model.optimizer, inner_optimizer(model)
    if any(getattr(v, "overwrite_with_gradient", False) for v in trainable):
        raise CaptureError(
            f"{_name(model)}: variables that are overwritten with their gradient (float8 training) cannot be "
            "distributed. Use another dtype policy, for instance mixed_bfloat16."
        )
    if not optimizer.built:
        with _rowless_slots(inner):
            optimizer.build(trainable)
    built_for = optimized_variables(inner)
    if [id(v) for v in built_for] != [id(v) for v in trainable]:
        raise CaptureError(
            f"{_name(model)}: its optimizer was built for {len(built_for)} variables and the model "
            f"now trains {len(trainable)}, not the same ones. Call compile() again after changing `trainable`."
        )


@contextmanager
def _rowless_slots(optimizer: Any) -> Iterator[None]:
    """Let an optimizer create no rows for tables that have none in this process."""
    add = optimizer.add_variable_from_reference

    def add_like(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        rowless = hasattr(reference_variable, "path") and has_no_rows(reference_variable)
        with without_rows({tuple(reference_variable.shape)} if rowless else ()):
            return add(reference_variable, *args, **kwargs)

    optimizer.add_variable_from_reference = add_like
    try:
        yield
    finally:
        del optimizer.add_variable_from_reference


def describe_optimizer(model: Any) -> OptimizerEntries:
    """Return the manifest's entries on the optimizer."""
    optimizer = inner_optimizer(model)
    trainable = model.trainable_variables
    serialize = serialization_lib.serialize_keras_object
    config = serialize(optimizer)
    probe, owners = _attributed(optimizer, config, trainable)
    attributes = _changed_attributes(optimizer, probe)
    elementwise = _is_elementwise(optimizer, owners, trainable)
    config["config"]["loss_scale_factor"] = None  # workers send gradients unscaled
    return OptimizerEntries(
        optimizer=config,
        optimizer_attributes=_serialized(attributes),
        optimizer_variables=owners,
        elementwise=elementwise,
        divisible=elementwise and _is_alike(optimizer, trainable),
        constraints=[serialize(v.constraint) for v in trainable],
        decay=[uses_weight_decay(optimizer, v) for v in trainable],
        loss_scale=loss_scale(model),
        auto_scale_loss=optimizer is not model.optimizer,
        local_optimizers=None,
    )


def describe_attributes(optimizer: Any) -> dict[str, Any]:
    """Return the attributes that the script gave a built optimizer besides its configuration, as configurations.

    Raises:
        CaptureError: the script has replaced a method of this optimizer.
    """
    config = serialization_lib.serialize_keras_object(optimizer)
    probe, _ = _attributed(optimizer, config, optimized_variables(optimizer))
    return _serialized(_changed_attributes(optimizer, probe))


def _another(optimizer: Any, config: Mapping[str, Any]) -> Any:
    """Return a second optimizer of this configuration; it needs no schedule, only the same number of variables."""
    arguments = copy.deepcopy(dict(config["config"]))
    if isinstance(arguments.get("learning_rate"), dict):
        arguments["learning_rate"] = _no_schedule
    try:
        return type(optimizer).from_config(arguments)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"Optimizer {optimizer.name!r}: expected one that Keras makes again from its get_config(), as other "
            f"processes do. Received: {error} Return the arguments of its constructor in get_config(); give a "
            "MultiOptimizer a keras.optimizers.OptimizerMap."
        ) from error


def _serialized(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: serialization_lib.serialize_keras_object(value) for name, value in attributes.items()}


def _changed_attributes(optimizer: Any, new: Any) -> dict[str, Any]:
    """Return the attributes that the script gave the optimizer besides its configuration, which made ``new``.

    Raises:
        CaptureError: the script has replaced a method of this optimizer.
    """
    found: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        if callable(getattr(type(optimizer), name, None)) and callable(value):
            raise CaptureError(
                f"Optimizer {optimizer.name!r}: the script has replaced its method {name!r}. Shards make an optimizer "
                "of their own. Write a subclass of the optimizer with this method."
            )
        is_new = name not in vars(new) and not name.startswith("_")
        is_changed = is_plain(value) and name in vars(new) and vars(new)[name] != value
        if is_new or is_changed:
            found[name] = value
    return found


def set_attributes(optimizer: Any, attributes: Mapping[str, Any]) -> None:
    """Set the attributes that :func:`describe_attributes` has found on an optimizer made from a configuration."""
    for name, value in copy.deepcopy(dict(attributes)).items():
        setattr(optimizer, name, serialization_lib.deserialize_keras_object(value, safe_mode=False))


def _attributed(
    optimizer: Any, config: Mapping[str, Any], trainable: list[Any]
) -> tuple[Any, list[dict[str, Any]] | None]:
    """Attribute each optimizer variable to a trainable one, by observing a second optimizer create its own.

    Returns:
        The second optimizer, built, and for each variable its shape, dtype and owner; None if that is not known.
    """
    probe = _another(optimizer, config)
    try:
        return probe, _attribute(probe, optimizer, trainable, scalars=True)
    except ValueError:  # its build() gives variables values, in their shapes
        probe = _another(optimizer, config)
        return probe, _attribute(probe, optimizer, trainable, scalars=False)


def _attribute(probe: Any, optimizer: Any, trainable: list[Any], *, scalars: bool) -> list[dict[str, Any]] | None:
    """Build the second optimizer; ``scalars``: with scalars as variables, which need no memory."""
    index = {id(variable): i for i, variable in enumerate(trainable)}
    owners: dict[int, int] = {}

    # ``build`` creates a slot by a reference to its variable: the reference tells the owner.
    def add(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        shape, dtype = () if scalars else reference_variable.shape, reference_variable.dtype
        made = probe.add_variable(shape=shape, initializer=initializer, dtype=dtype, name=name)
        owners[id(made)] = index.get(id(reference_variable), GLOBAL)
        return made

    probe.add_variable_from_reference = add
    probe.build(trainable)
    own = optimizer.variables
    if len(own) != len(probe.variables):
        return None
    described = [
        {"shape": [int(n) for n in v.shape], "dtype": str(v.dtype), "variable": owners.get(id(p), GLOBAL)}
        for v, p in zip(own, probe.variables, strict=True)
    ]
    opaque = any(entry["variable"] == GLOBAL and entry["shape"] for entry in described)
    return None if opaque else described


def _no_schedule() -> float:
    return 0.0


def _is_elementwise(optimizer: Any, owners: list[dict[str, Any]] | None, trainable: list[Any]) -> bool:
    if owners is None or public_class(optimizer) not in [getattr(keras.optimizers, name) for name in _ELEMENTWISE]:
        return False
    shapes = [[int(n) for n in v.shape] for v in trainable]
    return all(o["variable"] == GLOBAL or o["shape"] == shapes[o["variable"]] for o in owners)


def _is_alike(optimizer: Any, trainable: list[Any]) -> bool:
    """Return whether the options treat every element of every variable alike, so that shards may cut variables."""
    norms = optimizer.clipnorm or optimizer.global_clipnorm or any(v.constraint for v in trainable)
    return not norms and (not optimizer.weight_decay or all(uses_weight_decay(optimizer, v) for v in trainable))
