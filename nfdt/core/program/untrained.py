"""Untrained variables of a model, and the rules by which each is merged when several workers have changed it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from nfdt.core.keras_internals import flatten_layers

SEED_STATE = "seed_generator_state"


def carrying_layers(model: Any) -> list[Any]:
    """Return the recurrent layers with ``stateful=True``, whose batches begin with the state that the last one left."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, keras.layers.RNN) and layer.stateful]


def untrained_variables(model: Any) -> list[Any]:
    """Return ``model.non_trainable_variables`` and the states of :func:`carrying_layers`, which are not among them."""
    states = [state for layer in carrying_layers(model) for state in keras.tree.flatten(layer.states or [])]
    return [*model.non_trainable_variables, *states]


def describe_untrained(model: Any) -> list[dict[str, Any]]:
    """Return path, shape, dtype and merge rule of each of :func:`untrained_variables`, in that order.

    The rules are those of :mod:`nfdt.core.training.merge`: BatchNorm's moving statistics are composed, seeds stay with
    their worker, integers take the maximum, all other floats the mean.
    """
    decays = _moving_statistics(model)
    return [_describe(variable, decays.get(id(variable))) for variable in untrained_variables(model)]


def _describe(variable: Any, decay: float | None) -> dict[str, Any]:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    described = {"path": variable.path, "shape": [int(n) for n in variable.shape], "dtype": dtype, "decay": decay}
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


def values_of(variables: Any) -> list[np.ndarray[Any, Any]]:
    """Return the variables' values as NumPy arrays."""
    return [np.asarray(variable.numpy()) for variable in variables]
