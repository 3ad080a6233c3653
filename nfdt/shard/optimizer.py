"""The user's Keras optimizer on one shard's variables: building, loading, reading, and its traits for update rules."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from nfdt.core.errors import UsageError
from nfdt.core.sharding import GLOBAL, ShardPlan
from nfdt.model.keras_internals.training import set_path, set_weight_decay_use
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.optimizer import set_attributes
from nfdt.shard.optimizer_state import OptimizerPart, joined, traits_of_class
from nfdt.update_rules.base import OptimizerTraits

Array = npt.NDArray[Any]

_SLOT_NAMES = {"sgd": {"momentum": "momentums"}, "adam": {"m": "_momentums", "v": "_velocities"}, "other": {}}


@dataclass(frozen=True)
class BuiltOptimizer:
    """Optimizer and the Keras variables it updates: one flat variable, or one per variable of the model."""

    optimizer: Any
    variables: list[Any]
    plan: ShardPlan
    traits: OptimizerTraits

    def slots(self) -> dict[str, list[Any]]:
        """Return the variables that a rule takes over, by the rule's name for them, in the order of ``variables``."""
        names = _SLOT_NAMES[self.traits.kind]
        return {name: list(held) for name, attribute in names.items() if (held := getattr(self.optimizer, attribute))}

    def load(self, state: Mapping[int, Array]) -> None:
        """Take over the variables of the whole optimizer, by index; missing ones keep their initial value.

        Raises:
            ShapeMismatch: a variable has another shape.
        """
        for variable, parts in zip(self.optimizer.variables, self._part.held(state), strict=True):
            if parts is not None:
                variable.assign(joined(parts, tuple(variable.shape), variable.path))

    def is_complete(self, state: Mapping[int, Array]) -> bool:
        """Whether :meth:`load` replaces every variable."""
        return self._part.is_complete(state)

    def read(self) -> dict[int, Array]:
        """Return the shard's part of the whole optimizer's variables, by index; every shard returns the global ones."""
        return self._part.cut([variable.numpy() for variable in self.optimizer.variables])

    @property
    def _part(self) -> OptimizerPart:
        return OptimizerPart(self.plan, len(self.optimizer.variables))

    def own(self, state: Mapping[int, Array]) -> dict[int, Array]:
        """Return the variables of which every shard has its own, such as iterations; shards may differ in them."""
        return {s.index: state[s.index] for s in self.plan.slots or () if s.variable == GLOBAL}


def traits_of(optimizer: Any) -> OptimizerTraits:
    """Return the traits for update rules; a subclass of an optimizer may make other steps, so it is "other"."""
    exact = type(optimizer) in (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.AdamW)
    traits = traits_of_class(type(optimizer).__name__ if exact else "", vars(optimizer))
    return replace(traits, normalizes=not isinstance(optimizer, keras.optimizers.SGD))


def _variables(plan: ShardPlan, weights: Array, custom_objects: Mapping[str, Any]) -> list[Any]:
    if plan.flat:
        return [keras.Variable(weights, dtype="float32", name="shard")]
    made = []
    for slot, value, config in zip(plan.layout.slots, plan.layout.unflatten(weights), plan.constraints, strict=True):
        variable = keras.Variable(value, dtype="float32", name=slot.name.rsplit("/", 1)[-1] or "variable")
        set_path(variable, slot.name)  # optimizers may select by path; a name cannot hold one
        if config is not None:
            constraint = keras.saving.deserialize_keras_object(config, custom_objects=dict(custom_objects))
            variable.constraint = constraint
        made.append(variable)
    return made


def build_optimizer(
    manifest: Manifest, plan: ShardPlan, weights: Array, custom_objects: Mapping[str, Any] | None = None
) -> BuiltOptimizer:
    """Build the program's optimizer on this shard's variables.

    Gradients arrive unscaled (the worker divides), so a loss scale of the optimizer has no effect here.

    Args:
        manifest: The program's manifest.
        plan: This shard's part.
        weights: The shard's weights, flat, shape ``(plan.layout.size,)``, float32; copied.
        custom_objects: The user's own classes by registered name.

    Raises:
        UsageError: Keras cannot build the optimizer.
    """
    custom = dict(custom_objects or {})
    config = copy.deepcopy(dict(manifest.optimizer))  # Keras empties parts of its argument
    try:
        optimizer = keras.saving.deserialize_keras_object(config, custom_objects=custom)
        with keras.saving.custom_object_scope(custom):
            set_attributes(optimizer, manifest.optimizer_attributes)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Optimizer {config.get('class_name')!r}: Keras cannot build it: {error}") from error
    optimizer.loss_scale_factor = None  # workers send gradients without it
    variables = _variables(plan, np.asarray(weights, np.float32), custom)
    optimizer.build(variables)
    if not plan.flat and optimizer.weight_decay:
        set_weight_decay_use(optimizer, variables, plan.decay)
    return BuiltOptimizer(optimizer, variables, plan, traits_of(optimizer))


@contextmanager
def replaced(optimizer: Any, **methods: Any) -> Iterator[None]:
    """Replace methods of this optimizer instance while its step is traced."""
    before = {name: vars(optimizer).get(name) for name in methods}
    for name, method in methods.items():
        object.__setattr__(optimizer, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:
                object.__delattr__(optimizer, name)
            else:
                object.__setattr__(optimizer, name, method)
