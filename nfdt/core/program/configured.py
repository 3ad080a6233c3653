"""Whether Keras' configuration describes a model: only then is the model sent as its configuration."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import keras

from nfdt.core.keras_internals import SET_BY_KERAS, Functional, flatten_layers, own_variables, seed_generators
from nfdt.core.program.collect import is_keras_own
from nfdt.core.program.described import plain_attributes

_AFTER_THE_CONSTRUCTOR = {"built"}


def is_configured(model: Any) -> bool:
    """Return whether every layer is one of Keras' own, as its configuration describes it, with weights of its own."""
    layers = flatten_layers(model)
    if not all(is_keras_own(type(layer)) and not _replaced_methods(layer) for layer in layers):
        return False
    held = Counter(number for layer in layers for number in _held(layer))
    graphs = [layer for layer in layers if isinstance(layer, Functional | keras.Sequential)]
    members = Counter(id(layer) for graph in graphs for layer in graph.layers if layer.variables)
    # Keras would rebuild a layer of two graphs twice, each time with weights of its own.
    if any(count > 1 for count in (held + members).values()):
        return False
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
