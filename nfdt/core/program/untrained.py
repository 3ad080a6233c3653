"""Rules by which each untrained variable is merged when several workers have changed it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from nfdt.core.keras_internals import flatten_layers

SEED_STATE = "seed_generator_state"


def describe_untrained(model: Any) -> list[dict[str, Any]]:
    """Return path, shape, dtype and merge rule of each of ``model.non_trainable_variables``, in that order.

    The rules are those of :mod:`nfdt.core.training.merge`: BatchNorm's moving statistics are composed, seeds stay with
    their worker, integers take the maximum, all other floats the mean.
    """
    decays = _moving_statistics(model)
    return [_describe(variable, decays.get(id(variable))) for variable in model.non_trainable_variables]


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
