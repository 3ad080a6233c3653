"""The optimizer with which shards apply differences of weights that optimizers on the workers have made."""

from __future__ import annotations

from typing import Any

from nfdt.core.arrays.layout import ParameterLayout

GLOBAL = -1  # no trainable variable
Entries = tuple[dict[str, Any], list[dict[str, Any]]]


def outer_sgd(layout: ParameterLayout, rate: float, momentum: float) -> Entries:
    """Return the configuration of Nesterov SGD, whose gradient a difference is, and the description of its variables.

    A rate of 1 without momentum subtracts the difference, so that shards, codecs and recovery need no second path
    (decision 48).

    References:
        Douillard et al., "DiLoCo", arXiv:2311.08105: the outer optimizer and its hyperparameters.
    """
    options = {"learning_rate": rate, "momentum": momentum, "nesterov": momentum > 0, "name": "outer"}
    described: list[dict[str, Any]] = [{"shape": [], "dtype": "int64", "variable": GLOBAL}]  # iterations
    described.append({"shape": [], "dtype": "float32", "variable": GLOBAL})  # learning rate
    if momentum:
        slots = enumerate(layout.slots)
        described += [{"shape": list(slot.shape), "dtype": "float32", "variable": i} for i, slot in slots]
    config = {"module": "keras.optimizers", "class_name": "SGD", "config": options, "registered_name": None}
    return config, described
