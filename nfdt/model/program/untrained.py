"""Untrained variables of a model, and the rule by which each is merged after several workers have changed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nfdt.model.keras_internals.models import flatten_layers
from nfdt.model.program.manifest import GIVEN

SEED_STATE = "seed_generator_state"


def carrying_layers(model: Any) -> list[Any]:
    """Return the recurrent layers with ``stateful=True``, which carry their state from batch to batch."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]


def untrained_variables(model: Any) -> list[Any]:
    """Return ``model.non_trainable_variables`` and the states of :func:`carrying_layers`, which are not among them."""
    states = [state for layer in carrying_layers(model) for state in keras.tree.flatten(layer.states or [])]
    return [*model.non_trainable_variables, *states]


def describe_untrained(model: Any) -> list[dict[str, Any]]:
    """Return path, shape, dtype and merge rule of each of :func:`untrained_variables`, in that order.

    The rules are those of :mod:`nfdt.model.training.merge`: BatchNorm's moving statistics are composed, seeds stay with
    their worker, integers take the maximum, all other floats the mean.
    """
    decays = _moving_statistics(model)
    return [describe_variable(variable, decays.get(id(variable))) for variable in untrained_variables(model)]


def describe_given(names: Sequence[str]) -> list[dict[str, Any]]:
    """Describe what only the script changes, and is not a variable. Each value is bytes, empty until it changes.

    Args:
        names: ``attributes`` of the model; or ``train``, ``validation``: the field of the job's specification that
            names data, whose value is their pickle.
    """
    return [{"path": name, "shape": [0], "dtype": "uint8", "decay": None, "rule": GIVEN} for name in names]


def path_of(variable: Any) -> str:
    """Return the name of a variable of Keras, or of its backend, for messages."""
    return str(getattr(variable, "path", None) or variable.name)


def describe_variable(variable: Any, decay: float | None = None) -> dict[str, Any]:
    """Return path, shape, dtype and merge rule of a variable; ``decay``: that of a moving average."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    described = {"path": path_of(variable), "shape": [int(n) for n in variable.shape], "dtype": dtype, "decay": decay}
    if decay is not None:
        return {**described, "rule": "ema"}
    if variable.name == SEED_STATE:
        return {**described, "rule": "seed"}
    return {**described, "rule": "mean" if "float" in dtype else "max"}


def _moving_statistics(model: Any) -> dict[int, float]:
    found: dict[int, float] = {}
    for layer in flatten_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            found.update({id(v): float(layer.momentum) for v in (layer.moving_mean, layer.moving_variance)})
    return found
