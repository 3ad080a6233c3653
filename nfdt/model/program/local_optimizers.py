"""Optimizers that step on the workers, for a ``train_step`` that is more than one update of every trainable variable.

A worker runs such a step as it is, and pushes the difference of weights that it makes. The shards subtract it. The
variables of the optimizers are part of the worker's untrained state, and are merged at the end of an epoch:

======================================  ==================================================================
variable                                merge rule, see :mod:`nfdt.model.training.merge`
======================================  ==================================================================
``iterations``                          ``sum``: all updates of all workers
averages of gradients or their squares  ``ema``: as if one worker had made all steps; 1 - beta ** iterations
                                        therefore remains their share, as Adam assumes
other floats                            ``mean``
other counters                          ``max``
======================================  ==================================================================

Synchronous workers make one update per round together: their ``iterations`` agree, and averages are averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import current
from nfdt.model.keras_internals import training as keras_training
from nfdt.model.keras_internals.models import serialization_lib
from nfdt.model.program.compiling import overrides
from nfdt.model.program.manifest import Manifest, OptimizerEntries
from nfdt.model.program.optimizer import (
    build_optimizer_variables,
    describe_attributes,
    is_divided,
    optimizer_parts,
    own_optimizers,
    set_attributes,
    unscaled,
)
from nfdt.model.program.step_effects import StepEffects, trace_step
from nfdt.model.program.untrained import describe_variable, untrained_variables

GLOBAL = -1  # no trainable variable

Described = Sequence[Mapping[str, Any] | None]
"""Per optimizer of the model, in the order of ``own_optimizers``, its description; None if the step does not use it."""


def trace_own_step(model: Any, batch: Any) -> StepEffects | None:
    """Trace the step of a model with a ``train_step`` of its own, or with several optimizers; None for other models.

    On JAX and PyTorch such a model may have one optimizer, and its step is not traced.

    Args:
        model: A compiled, built model.
        batch: A batch as ``train_step`` receives it.

    Raises:
        CaptureError: an optimizer is no attribute of the model, or several are on a backend that allows one.
        Exception: any exception of the model's own code for such a batch, as in ``fit``.
    """
    if not is_divided(model.optimizer) and not overrides(model, "train_step"):
        return None
    if not current().traces_steps:
        _require_one_optimizer(model)
        return None
    return trace_step(model, batch)


def describe_local_optimizers(model: Any, effects: StepEffects | None) -> list[dict[str, Any] | None] | None:
    """Build and describe the optimizers of a model whose step must run unchanged; None for other models.

    Raises:
        CaptureError: an optimizer is applied to a variable that is not the model's, or that it was not built for.
    """
    if effects is None:
        return None
    if effects.is_one_update(model) and not is_divided(model.optimizer) and not _updates_a_part(model):
        return None
    return [_described(model, optimizer, effects) for optimizer in own_optimizers(model)]


def _require_one_optimizer(model: Any) -> None:
    """Raise CaptureError if the model has several optimizers."""
    inner = unscaled(model.optimizer)
    parts = [part for optimizer in own_optimizers(model) for part in optimizer_parts(optimizer)]
    others = [part.name for part in parts if part is not inner]
    if others:
        # Only TensorFlow has a step that runs as it is, see ``KerasBackend.traces_steps``.
        raise CaptureError(
            f"{type(model).__name__} {model.name!r}: expected Keras on TensorFlow for a model with several optimizers. "
            f"Received: {', '.join(others)}, besides that of compile(), on {current().name}. Set "
            "KERAS_BACKEND=tensorflow."
        )


def _updates_a_part(model: Any) -> bool:
    """Return whether the model's optimizer was built for some of the trainable variables only."""
    if model.optimizer is None or not model.optimizer.built:
        return False
    trainable = {id(variable) for variable in model.trainable_variables}
    return {id(variable) for variable in keras_training.optimized_variables(unscaled(model.optimizer))} < trainable


def _described(model: Any, optimizer: Any, effects: StepEffects) -> dict[str, Any] | None:
    calls = effects.applications(optimizer)
    if not calls:
        return None
    trainable = model.trainable_variables
    if not optimizer.built:
        optimizer.build([trainable[place] for place in calls[0].variables])  # as its first apply() does
    inner = unscaled(optimizer)
    places = {id(variable): place for place, variable in enumerate(trainable)}
    built_for = [places.get(id(variable)) for variable in keras_training.optimized_variables(inner)]
    unknown = {place for call in calls for place in call.variables} - {*built_for}
    if unknown or None in built_for:
        what = f"an update of {trainable[min(unknown)].path!r}" if unknown else "some that are not trainable now"
        raise CaptureError(
            f"Optimizer {optimizer.name!r}: expected the variables of its first update, which it was built for. "
            f"Received: {what}. Make another optimizer, and call compile() again, after a change of `trainable`."
        )
    return _entry(optimizer, built_for, len(calls))


def _entry(optimizer: Any, places: Sequence[int | None], applications: int) -> dict[str, Any]:
    """Return what workers need of an optimizer for these trainable variables, by index."""
    inner = unscaled(optimizer)
    return {
        "variables": list(places),
        "applications": applications,
        "attributes": describe_attributes(inner),
        "decay": [
            [keras_training.uses_weight_decay(part, v) for v in _built_for(part)] for part in optimizer_parts(inner)
        ],
    }


def describe_every_step(model: Any) -> list[dict[str, Any] | None]:
    """Build and describe the optimizer of a model whose steps are one update each, to step on the workers."""
    build_optimizer_variables(model)
    places = range(len(model.trainable_variables))
    return [_entry(one, places, 1) if one is model.optimizer else None for one in own_optimizers(model)]


def with_configuration(model: Any, described: Described) -> Described:
    """Return the description of a model's only optimizer with the configuration from which workers make it."""
    config = serialization_lib.serialize_keras_object(model.optimizer)
    return [{**entry, "config": config} for entry in described if entry is not None]


def local_entries(model: Any, described: Described, outer: tuple[float, float]) -> OptimizerEntries:
    """Return the manifest's entries on the optimizers: that of the shards applies differences of weights.

    ``outer``: its learning rate and Nesterov momentum.
    """
    constraints = [serialization_lib.serialize_keras_object(v.constraint) for v in model.trainable_variables]
    layout = ParameterLayout.of([(v.path, tuple(v.shape)) for v in model.trainable_variables])
    optimizer, variables = _outer_sgd(layout, *outer)
    return OptimizerEntries(
        optimizer=optimizer,
        optimizer_attributes={},
        optimizer_variables=variables,
        elementwise=True,
        divisible=not any(constraints),
        constraints=constraints,
        decay=[True] * len(constraints),
        loss_scale=None,
        auto_scale_loss=False,
        local_optimizers=described,
    )


def _outer_sgd(layout: ParameterLayout, rate: float, momentum: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
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


def build_local_optimizers(model: Any, described: Described) -> None:
    """Create the variables of the optimizers of a worker's model, as in the script.

    Args:
        model: A model with the optimizers of the script.
        described: Result of :func:`describe_local_optimizers` in the script.
    """
    for optimizer, entry in used_optimizers(model, described):
        set_attributes(unscaled(optimizer), entry["attributes"])
    create_variables(model, described)
    for optimizer, entry in used_optimizers(model, described):
        for part, decays in zip(optimizer_parts(optimizer), entry["decay"], strict=True):
            if part.weight_decay and not all(decays):
                keras_training.set_weight_decay_use(part, _built_for(part), decays)


def _built_for(optimizer: Any) -> list[Any]:
    """Return the variables of an optimizer; a part of another one may have none."""
    return keras_training.optimized_variables(optimizer) if optimizer.built else []


def create_variables(model: Any, described: Described | None) -> None:
    """Create the variables of the optimizers that step on workers, unless they exist."""
    for optimizer, entry in used_optimizers(model, described):
        if not optimizer.built:
            optimizer.build([model.trainable_variables[index] for index in entry["variables"]])


def learning_rates(model: Any, described: Described | None) -> list[Any]:
    """Return the variables among :func:`optimizer_state` that hold the learning rates that no schedule decides."""
    used = used_optimizers(model, described)
    rates = [keras_training.raw_learning_rate(part) for optimizer, _ in used for part in optimizer_parts(optimizer)]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def used_optimizers(model: Any, described: Described | None) -> list[tuple[Any, Mapping[str, Any]]]:
    """Return the optimizers of a model that step on the worker, with their descriptions."""
    pairs = zip(own_optimizers(model), described, strict=True) if described is not None else ()
    return [(optimizer, entry) for optimizer, entry in pairs if entry is not None]


def stepping_parts(model: Any, manifest: Manifest) -> list[Any]:
    """Return the optimizers of a model that step on the worker once per step; of a ``MultiOptimizer`` its parts."""
    used = used_optimizers(model, manifest.local_optimizers)
    once = [optimizer for optimizer, entry in used if entry["applications"] == 1]
    return [part for optimizer in once for part in optimizer_parts(optimizer)]


def optimizer_state(model: Any, described: Described | None) -> list[Any]:
    """Return the variables of the optimizers that step on the worker, a part of its untrained state."""
    return [variable for optimizer, _ in used_optimizers(model, described) for variable in optimizer.variables]


def describe_optimizer_state(model: Any, optimizers: Described | None) -> list[dict[str, Any]]:
    """Return path, shape, dtype, merge rule and decay of each variable of :func:`optimizer_state`."""
    found = []
    for number, (optimizer, entry) in enumerate(used_optimizers(model, optimizers)):
        parts = optimizer_parts(optimizer)
        own = {"optimizer": number, "applications": entry["applications"]}
        averages = {key: decay for part in parts for key, decay in keras_training.moving_averages(part).items()}
        # A step that applies an optimizer several times decays its averages as often.
        decays = {key: decay ** entry["applications"] for key, decay in averages.items()}
        for variable in optimizer.variables:
            described = describe_variable(variable, decays.get(id(variable)))
            counts_updates = any(variable is keras_training.own_iterations(part) for part in parts)
            found.append({**described, **own, **({"rule": "sum"} if counts_updates else {})})
    return found


def merged_in_rounds(model: Any, manifest: Manifest) -> Manifest:
    """Return the manifest of a program for workers that step in rounds, each of which counts as one update."""
    others = {"sum": "max", "ema": "mean"}
    count = len(untrained_variables(model))
    own, of_optimizers = manifest.untrained[:count], manifest.untrained[count:]
    in_rounds = [{**entry, "rule": others.get(entry["rule"], entry["rule"])} for entry in of_optimizers]
    return manifest.replaced(untrained=[*own, *in_rounds])


def state_variables(model: Any, manifest: Manifest | None) -> list[Any]:
    """Return the variables of the program's ``untrained`` that are a part of the model, the first ones, in order."""
    described = manifest.local_optimizers if manifest is not None else None
    return [*untrained_variables(model), *optimizer_state(model, described)]
