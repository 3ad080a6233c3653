"""Conversion of a program to a compiled Keras model with weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.safetensors_io import give_back
from nfdt.core.errors import ProtocolError, ShapeMismatch
from nfdt.model.backends.contract import current
from nfdt.model.backends.embedding import zero_rows
from nfdt.model.backends.variables import assign_values
from nfdt.model.keras_internals.models import (
    flatten_layers,
    has_no_rows,
    initialize_variable,
    serialization_lib,
    without_rows,
)
from nfdt.model.keras_internals.training import set_path
from nfdt.model.program.attributes import NAME as ATTRIBUTES
from nfdt.model.program.attributes import Attributes
from nfdt.model.program.building import blank_batch, build_model, load_assets
from nfdt.model.program.code import load_code, load_with_variables
from nfdt.model.program.forward_check import check_outputs
from nfdt.model.program.local_optimizers import build_local_optimizers, state_variables
from nfdt.model.program.manifest import GIVEN, Manifest
from nfdt.model.program.optimizer import INNER_OPTIMIZER, OPTIMIZER, inner_optimizer, set_attributes, unscaled
from nfdt.model.program.state import State, StateRanges, load_state
from nfdt.model.program.untrained import path_of

ReadRanges = Callable[[str, Sequence[tuple[int, int]]], bytes]
"""Bytes of some (offset, length) ranges of an artifact, by its sha256, one after the other."""

_DIFFERENT = (
    "The model builds differently here than in the script; a constructor that depends on something outside of "
    "get_config() does that."
)


def unpack(manifest: Manifest, read: Callable[[str], bytes | memoryview], *, allow_code: bool) -> Any:
    """Build the program's model; see :func:`unpack_with_variables`."""
    return unpack_with_variables(manifest, read, allow_code=allow_code)[0]


def unpack_with_variables(
    manifest: Manifest,
    read: Callable[[str], bytes | memoryview],
    *,
    allow_code: bool,
    tables: Sequence[int] = (),
    read_ranges: ReadRanges | None = None,
) -> tuple[Any, list[Any]]:
    """Build the program's model: compiled, with weights and untrained state; the optimizer's slots are left out.

    Args:
        manifest: The program, see :mod:`nfdt.model.program.pack`.
        read: Returns an artifact's bytes by its sha256.
        allow_code: Whether a program may contain Python code of its own.
        tables: Trainable variables, by index, that are on the shards: the model looks up rows of a batch.
        read_ranges: Returns the bytes of some (offset, length) ranges of an artifact; needed with ``tables``.

    Returns:
        A ``keras.Model``, and the variables that the program has besides the model's.

    Raises:
        PolicyRefused: the program needs code, or names an object that is not allowed without code.
        ModelMismatch: the model built here computes other outputs than the script's.
        VersionMismatch: its code was pickled by another minor version of Python.
        ShapeMismatch: the model built here has other variables than the program states.
        ProtocolError: the program is malformed.
    """
    objects = load_code(manifest, read, allow_code=allow_code)
    program, outside = manifest.copied(), list[Any]()  # Keras empties some of its arguments
    _set_globals(program.settings)
    shapes = {manifest.layout.slots[index].shape for index in tables}
    with keras.saving.custom_object_scope(objects), serialization_lib.ObjectSharingScope(), without_rows(shapes):
        if manifest.by_value:
            model, outside = _load_by_value(program, read)
        else:
            model = _build_from_config(program)
        load_assets(model, program.assets, read)
        if not manifest.by_value:
            with zero_rows():
                build_model(model, blank_batch(program.input), predicts=program.predicts)
    _set_trainable(model, program)
    current().settle(model)
    if program.local_optimizers is not None:
        build_local_optimizers(model, program.local_optimizers)
    if ATTRIBUTES in program.given:
        outside.append(Attributes(model))
    if not tables:
        load(model, program, read, outside)
        # A model that was built differently would train without an error.
        check_outputs(model, manifest, read)
        return model, outside
    assert read_ranges is not None, "a model with tables on the shards needs the ranges of its state"
    state = StateRanges(partial(read_ranges, manifest.state), manifest.layout, manifest.made)
    _keep_rowless(model, tables)
    current().use_rows(model, tables)
    load_from(state.without(tables), model, program, outside, tables)
    check_outputs(model, manifest, read, lambda table, numbers: state.rows(tables[table], numbers))
    return model, outside


def _keep_rowless(model: Any, tables: Sequence[int]) -> None:
    """Give all variables that are not tables on the shards their memory, where they have the shape of one."""
    kept = {id(model.trainable_variables[index]) for index in tables}
    for variable in model.variables:
        if has_no_rows(variable) and id(variable) not in kept:
            initialize_variable(variable, keras.ops.zeros(variable.shape, variable.dtype))


def load(
    model: Any, manifest: Manifest, read: Callable[[str], bytes | memoryview], outside: Sequence[Any] = ()
) -> None:
    """Give a model of this program the weights, the untrained state and the count of updates that it starts with.

    Args:
        model: A model that :func:`unpack` has made of this program, or of one that differs in its state alone.
        manifest: The program.
        read: Returns an artifact's bytes by its sha256.
        outside: Variables that the program has besides the model's.
    """
    load_from(load_state(read(manifest.state)), model, manifest, outside)


def load_from(
    state: State, model: Any, manifest: Manifest, outside: Sequence[Any] = (), tables: Sequence[int] = ()
) -> None:
    """Give a model what :func:`load` gives it, from a state whose weights are those outside the ``tables``."""
    layout = manifest.layout
    _check_shapes("trainable", [slot.shape for slot in layout.slots], model.trainable_variables)
    of_model = state_variables(model, manifest)
    untrained = [*of_model, *outside]
    entries = [tuple(u["shape"]) for u in manifest.untrained if u["rule"] != GIVEN]
    _check_shapes("untrained", entries, [v for v in untrained if not isinstance(v, Attributes)])
    values = iter(layout.without(tables).unflatten(state.weights))
    for index, (variable, slot) in enumerate(zip(model.trainable_variables, layout.slots, strict=True)):
        set_path(variable, slot.name)  # Keras builds a model from its configuration under other paths
        if index not in tables:
            value = next(values)
            assign_values([variable], [value])
            give_back(value)
    for index, variable in enumerate(untrained):
        if index < len(of_model):
            set_path(variable, manifest.untrained[index]["path"])
        if index in state.untrained:
            assign_values([variable], [state.untrained[index]])
    for layer in flatten_layers(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # the layer computes with a copy of its variables
    if 0 in state.optimizer and state.optimizer[0].shape == () and not manifest.steps_on_workers:
        inner_optimizer(model).variables[0].assign(np.asarray(state.optimizer[0]))  # iterations, read by train_step


def _build_from_config(program: Manifest) -> Any:
    model = serialization_lib.deserialize_keras_object(program.model, safe_mode=not program.is_code)
    if not isinstance(model, keras.Model):
        raise ProtocolError(f"Program: expected a model. Received: {type(model).__name__}.")
    arguments = serialization_lib.deserialize_keras_object(program.compile_config, safe_mode=not program.is_code)
    for entry in program.local_optimizers or ():  # one
        config = (entry or {}).get("config")
        arguments["optimizer"] = serialization_lib.deserialize_keras_object(config, safe_mode=not program.is_code)
    keras.Model.compile(model, **arguments, auto_scale_loss=False)  # its optimizer is wrapped already, where necessary
    return model


def _load_by_value(program: Manifest, read: Callable[[str], bytes | memoryview]) -> tuple[Any, list[Any]]:
    references = {}
    if not program.steps_on_workers:
        optimizer = serialization_lib.deserialize_keras_object(program.compile_config["optimizer"], safe_mode=False)
        references = {OPTIMIZER: optimizer, INNER_OPTIMIZER: unscaled(optimizer)}
        set_attributes(references[INNER_OPTIMIZER], program.optimizer_attributes)
    return load_with_variables(program, str(program.by_value), read, references)


def _set_globals(settings: Mapping[str, Any]) -> None:
    keras.config.set_floatx(settings["floatx"])
    keras.config.set_epsilon(settings["epsilon"])
    keras.config.set_image_data_format(settings["image_data_format"])
    keras.config.set_dtype_policy(keras.dtype_policies.deserialize(copy.deepcopy(settings["dtype_policy"])))


def _set_trainable(model: Any, program: Manifest) -> None:
    """Freeze what is frozen in the user's model: outer layers first, because freezing a layer freezes inner ones."""
    _set_flags("layers", flatten_layers(model), program.trainable_layers)
    _set_flags("variables", model.variables, program.trainable_variables)


def _set_flags(what: str, objects: Sequence[Any], flags: Sequence[bool]) -> None:
    if len(objects) != len(flags):
        raise ShapeMismatch(f"Program: expected a model of {len(flags)} {what}. Received: {len(objects)}. {_DIFFERENT}")
    for obj, flag in zip(objects, flags, strict=True):
        if obj.trainable != flag:
            obj.trainable = flag


def _check_shapes(kind: str, expected: Sequence[tuple[int, ...]], variables: Sequence[Any]) -> None:
    received = [tuple(int(n) for n in v.shape) for v in variables]
    if received == list(expected):
        return
    different = [f"{path_of(v)} {r}" for v, r, e in zip(variables, received, expected, strict=False) if r != e]
    raise ShapeMismatch(
        f"Program: expected {len(expected)} {kind} variables of the shapes it names. Received: {len(received)}, the "
        f"first that differs: {next(iter(different), 'none')}. {_DIFFERENT}"
    )
