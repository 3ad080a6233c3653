"""Descriptions of a model that is sent by value, and whether Keras' configuration describes a model completely.

Descriptions tell whether two models are the same program, and what differs. They consist of plain values: numbers,
booleans, strings, None, and pytrees of these.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Mapping
from typing import Any

import keras

from nfdt.model.keras_internals.models import SET_BY_KERAS, Functional, flatten_layers, own_variables, seed_generators
from nfdt.model.program.collect import is_keras_own

_MAX_TEXT = 200
_OF_A_PROCESS = ("seed",)  # drawn by each process
_AFTER_THE_CONSTRUCTOR = {"built"}


def describe_layers(model: Any) -> list[dict[str, Any]]:
    """Return name, class and plain attributes of the model and of each of its layers."""
    return [
        {"name": layer.path or layer.name, "class": type(layer).__qualname__, "attributes": _shortened(layer)}
        for layer in flatten_layers(model)
    ]


def _shortened(obj: Any) -> dict[str, Any]:
    attributes = plain_attributes(obj)
    return {
        name: value if len(repr(value)) <= _MAX_TEXT else f"{repr(value)[:_MAX_TEXT]}..."
        for name, value in attributes.items()
        if name not in _OF_A_PROCESS
    }


def describe_value(value: Any) -> Any:
    """Return a JSON value that describes an argument: functions by name, objects by class and plain attributes."""
    if is_plain(value):
        return unwrap(value)
    if isinstance(value, Mapping):
        return {str(key): describe_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe_value(item) for item in value]
    if isinstance(value, keras.optimizers.Optimizer) or not hasattr(value, "__dict__"):
        return type(value).__qualname__
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    return {"class": type(value).__qualname__, "attributes": _shortened(value)}


def first_difference(model: Any, expected: list[dict[str, Any]]) -> str | None:
    """Return a sentence about the first layer of a model that differs from a description, None if none does."""
    received = describe_layers(model)
    for mine, theirs in zip(received, expected, strict=False):
        if mine["class"] != theirs["class"]:
            return f"Layer {theirs['name']!r} is a {theirs['class']} in the script and a {mine['class']} here."
        for name in sorted({*mine["attributes"], *theirs["attributes"]}):
            script, here = (_portable(found["attributes"].get(name)) for found in (theirs, mine))
            if repr(script) != repr(here):
                return (
                    f"Layer {theirs['name']!r}: its attribute {name!r} is {script!r} in the script and {here!r} here."
                )
    if len(received) != len(expected):
        return f"The model has {len(expected)} layers in the script and {len(received)} here."
    return None


def _portable(value: Any) -> Any:
    """Return a value in the form after decoding JSON."""
    if isinstance(value, Mapping):
        return {key: _portable(item) for key, item in sorted(value.items())}
    return [_portable(item) for item in value] if isinstance(value, list | tuple) else value


def plain_attributes(obj: Any) -> dict[str, Any]:
    """Return the public attributes of an object that are numbers, booleans, texts, None, or pytrees of these."""
    return {name: unwrap(value) for name, value in vars(obj).items() if not name.startswith("_") and is_plain(value)}


def unwrap(value: Any) -> Any:
    """Return a plain value in dicts, lists and tuples, without the wrappers with which TensorFlow tracks these."""
    if isinstance(value, Mapping):
        return {key: unwrap(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = map(unwrap, value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    return value


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, boolean, text, None, or a pytree of these."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float | bool)


def is_configured(model: Any) -> bool:
    """Return whether all layers are Keras' own, equal what their configurations describe, and share no weights."""
    layers = flatten_layers(model)
    if not all(is_keras_own(type(layer)) and not _replaced_methods(layer) for layer in layers):
        return False
    held = Counter(number for layer in layers for number in _held(layer))
    graphs = [layer for layer in layers if isinstance(layer, Functional | keras.Sequential)]
    members = Counter(id(layer) for graph in graphs for layer in graph.layers if layer.variables)
    # Keras would rebuild a layer of two graphs twice, each time with weights of its own.
    if any(count > 1 for count in (held + members).values()):
        return False
    # Each of these would train as another model, without an error, if it was rebuilt from its configuration.
    if not all(_is_as_stated(layer, kind) for layer in layers for kind in ("regularizer", "constraint")):
        return False
    return all(_equals_a_new_one(layer) for layer in layers if not isinstance(layer, Functional | keras.Sequential))


def _held(layer: Any) -> set[int]:
    """Return the variables of a layer by ``id``, without those of its own layers: a wrapper may refer to these."""
    inner = {id(variable) for member in flatten_layers(layer)[1:] for variable in own_variables(member)}
    return {id(variable) for variable in own_variables(layer)} - inner


def _replaced_methods(layer: Any) -> list[str]:
    """Return the methods of a layer that the script has replaced on the object."""
    return [
        name
        for name, value in vars(layer).items()
        if isinstance(getattr(type(layer), name, None), types.FunctionType)
        and callable(value)
        and name not in SET_BY_KERAS
    ]


def _is_as_stated(layer: Any, kind: str) -> bool:
    """Return whether the variables of a layer have the regularizers, or constraints, that its configuration states."""
    attributes = vars(layer)
    stated = {id(value) for name, value in attributes.items() if name.endswith(kind)}
    for name, variable in attributes.items():
        if not isinstance(variable, keras.Variable):
            continue
        has = getattr(variable, kind)
        if has is None and attributes.get(f"{name.strip('_')}_{kind}") is not None:
            return False
        if has is not None and id(has) not in stated:
            return False
    return True


def _equals_a_new_one(layer: Any) -> bool:
    """Return whether a layer made from the configuration has the same seeds and plain attributes."""
    try:
        new = type(layer).from_config(layer.get_config())
    except Exception:  # a Lambda, or an argument that is a function of the script
        return False
    if len(seed_generators(new)) != len(seed_generators(layer)):
        return False
    mine, theirs = plain_attributes(layer), plain_attributes(new)
    return all(mine.get(name) == value for name, value in theirs.items() if name not in _AFTER_THE_CONSTRUCTOR)
