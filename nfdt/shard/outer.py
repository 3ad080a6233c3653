"""The outer optimizer of a shard, for workers that push differences of weights instead of gradients."""

from __future__ import annotations

from typing import Any

from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State


def pushes_differences(algorithm: AlgorithmSpec) -> bool:
    """Return whether workers push differences ``pulled - own``, made by the user's optimizer elsewhere."""
    return algorithm.topology_facts.grouped and algorithm.outer == "delta"


def served_program(manifest: Manifest, state: State, algorithm: AlgorithmSpec) -> tuple[Manifest, State, AlgorithmSpec]:
    """Return program, state and algorithm of the shards: with the outer optimizer where workers push differences."""
    if not pushes_differences(algorithm):
        return manifest, state, algorithm
    return outer_program(manifest, algorithm), State(state.weights), outer_algorithm(algorithm)


def outer_program(manifest: Manifest, algorithm: AlgorithmSpec) -> Manifest:
    """Return the program with Nesterov SGD instead of the user's optimizer; a difference is its gradient.

    Its variables are not part of the job's state. Weight decay belongs to the user's optimizer, and is included in the
    difference.

    References:
        Douillard et al., "DiLoCo", arXiv:2311.08105: the outer optimizer and its hyperparameters.
    """
    slots = manifest.layout.slots
    rate, momentum = algorithm.outer_lr, algorithm.outer_momentum
    options = {"learning_rate": rate, "momentum": momentum, "nesterov": momentum > 0, "name": "outer"}
    described: list[dict[str, Any]] = [{"shape": [], "dtype": "int64", "variable": -1}]  # iterations
    described.append({"shape": [], "dtype": "float32", "variable": -1})  # learning rate
    if momentum:
        described += [{"shape": list(s.shape), "dtype": "float32", "variable": i} for i, s in enumerate(slots)]
    config = {"module": "keras.optimizers", "class_name": "SGD", "config": options, "registered_name": None}
    return manifest.with_optimizer(config, described)


def outer_algorithm(algorithm: AlgorithmSpec) -> AlgorithmSpec:
    """Return the algorithm without curvature compensation, which differences do not measure; delays still count."""
    return algorithm.model_copy(update={"dc_lambda": 0.0})
