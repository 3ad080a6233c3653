"""The user's Keras optimizer on one shard's variables: building, loading, reading, and its traits for update rules."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ShapeMismatch, UsageError
from nfdt.core.keras_internals import set_path, set_weight_decay_use
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.optimizer import set_attributes
from nfdt.core.sharding import GLOBAL, OptimizerSlot, ShardPlan
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
        own = self.optimizer.variables
        for variable, members in zip(own, self.plan.bindings(len(own)), strict=True):
            if all(slot.index in state for slot in members):
                variable.assign(_joined(variable, [_held(state[slot.index], slot) for slot in members]))

    def is_complete(self, state: Mapping[int, Array]) -> bool:
        """Whether :meth:`load` replaces every variable."""
        return all(slot.index in state for slots in self.plan.bindings(len(self.optimizer.variables)) for slot in slots)

    def read(self) -> dict[int, Array]:
        """Return the shard's part of the whole optimizer's variables, by index; every shard returns the global ones."""
        own = self.optimizer.variables
        found: dict[int, Array] = {}
        for variable, members in zip(own, self.plan.bindings(len(own)), strict=True):
            value = variable.value.numpy()
            found.update(
                {members[0].index: value} if len(members) == 1 and not self.plan.flat else _cut(value, members)
            )
        return dict(sorted(found.items()))

    def own(self, state: Mapping[int, Array]) -> dict[int, Array]:
        """Return the variables of which every shard has its own, such as iterations; shards may differ in them."""
        return {s.index: state[s.index] for s in self.plan.slots or () if s.variable == GLOBAL}


def _held(whole: Array, slot: OptimizerSlot) -> Array:
    """Return this shard's part of a variable of the whole optimizer."""
    flat = np.asarray(whole).reshape(-1)
    return flat if slot.start is None else flat[slot.start : slot.start + math.prod(slot.shape)]


def _joined(variable: Any, parts: list[Array]) -> Array:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if whole.size != int(np.prod(variable.shape)):
        raise ShapeMismatch(
            f"Optimizer variable {variable.path!r}: expected {int(np.prod(variable.shape))} elements. "
            f"Received: {whole.size}. The state belongs to another program."
        )
    return whole.reshape(tuple(variable.shape))


def _cut(value: Array, members: tuple[OptimizerSlot, ...]) -> dict[int, Array]:
    borders = np.cumsum([int(np.prod(slot.shape)) for slot in members])[:-1]
    parts = np.split(value.reshape(-1), borders)
    return {slot.index: part.reshape(slot.shape) for slot, part in zip(members, parts, strict=True)}


def traits_of(optimizer: Any) -> OptimizerTraits:
    """Return the traits for update rules; every optimizer whose step is not known exactly is "other"."""
    kind = type(optimizer)
    traits = OptimizerTraits(
        normalizes=not isinstance(optimizer, keras.optimizers.SGD), decays=bool(optimizer.weight_decay)
    )
    if optimizer.gradient_accumulation_steps:
        return traits
    if kind is keras.optimizers.SGD:
        momentum, nesterov = float(optimizer.momentum), bool(optimizer.nesterov)
        return replace(traits, kind="sgd", momentum=momentum, nesterov=nesterov)
    if kind in (keras.optimizers.Adam, keras.optimizers.AdamW) and not optimizer.amsgrad:
        beta_1, beta_2 = float(optimizer.beta_1), float(optimizer.beta_2)
        return replace(traits, kind="adam", beta_1=beta_1, beta_2=beta_2, epsilon=float(optimizer.epsilon))
    return traits


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
    manifest: Manifest,
    plan: ShardPlan,
    weights: Array,
    custom_objects: Mapping[str, Any] | None = None,
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
    optimizer.loss_scale_factor = None
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
