"""The shard's part of the optimizer's variables, and optimizers that run without Keras."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.core.errors import ShapeMismatch
from nfdt.core.sharding import OptimizerSlot, ShardPlan
from nfdt.model.program.manifest import Manifest
from nfdt.update_rules.base import OptimizerTraits

Array = npt.NDArray[Any]

_BY_KERAS = ("use_ema", "clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps")
"""Options whose part of the step an update rule does not replace."""


class OptimizerPart:
    """The variables of a shard's optimizer as parts of those of the whole optimizer, by index.

    Args:
        plan: The shard's part of the program.
        variables: Number of variables of the shard's optimizer.

    Raises:
        UsageError: the shard's optimizer has other variables than the program states.
    """

    def __init__(self, plan: ShardPlan, variables: int) -> None:
        self._flat = plan.flat
        self._members = plan.bindings(variables)

    def held(self, state: Mapping[int, Array]) -> list[list[Array] | None]:
        """Return, for each variable of the shard, its parts; None for one that ``state`` lacks."""
        complete = [all(slot.index in state for slot in members) for members in self._members]
        return [
            [part_of(state[slot.index], slot) for slot in members] if whole else None
            for members, whole in zip(self._members, complete, strict=True)
        ]

    def is_complete(self, state: Mapping[int, Array]) -> bool:
        """Whether ``state`` has every variable."""
        return all(slot.index in state for members in self._members for slot in members)

    def places(self, variable: int) -> list[tuple[int, tuple[int, ...], int, int]]:
        """Return index and shape of those of the whole optimizer's variables that a variable of the shard consists of.

        Each with its first element in the variable of the shard, and the one behind its last.
        """
        members = self._members[variable]
        ends = np.cumsum([math.prod(slot.shape) for slot in members]).tolist()
        starts = [0, *ends[:-1]]
        return [(m.index, m.shape, a, b) for m, a, b in zip(members, starts, ends, strict=True)]

    def cut(self, values: Sequence[Array]) -> dict[int, Array]:
        """Return first variables of the shard as parts of the whole optimizer's; all shards have the global ones."""
        found: dict[int, Array] = {}
        for value, members in zip(values, self._members, strict=False):
            alone = len(members) == 1 and not self._flat
            found.update({members[0].index: value} if alone else _cut(value, members))
        return dict(sorted(found.items()))


def joined(parts: list[Array], shape: tuple[int, ...], name: str) -> Array:
    """Return the parts of a variable as one array of this shape.

    Raises:
        ShapeMismatch: they have another number of elements.
    """
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if whole.size != math.prod(shape):
        raise ShapeMismatch(
            f"Optimizer variable {name!r}: expected {math.prod(shape)} elements. Received: {whole.size}. The state "
            "belongs to another program."
        )
    return whole.reshape(shape)


def plain_traits(manifest: Manifest) -> OptimizerTraits | None:
    """Return the traits of an optimizer that an update rule can replace as a whole; None if its step needs Keras.

    It is Keras' own SGD, Adam or AdamW with a number as its learning rate, and with no option besides weight decay.
    """
    entry, options = manifest.optimizer, manifest.optimizer_options
    own = str(entry.get("module")).startswith("keras.") and entry.get("registered_name") in (None, entry["class_name"])
    if not own or manifest.optimizer_attributes or not isinstance(options.get("learning_rate"), float):
        return None
    if any(options.get(name) for name in _BY_KERAS):
        return None
    traits = traits_of_class(entry["class_name"], options)
    return None if traits.kind == "other" else traits


def traits_of_class(name: str, options: Mapping[str, Any]) -> OptimizerTraits:
    """Return the traits of an optimizer of Keras, given its class and its options.

    An optimizer whose step is not known exactly is "other".
    """
    traits = OptimizerTraits(normalizes=name != "SGD", decays=bool(options.get("weight_decay")))
    if options.get("gradient_accumulation_steps"):
        return traits
    if name == "SGD":
        momentum, nesterov = float(options.get("momentum", 0.0)), bool(options.get("nesterov"))
        return replace(traits, kind="sgd", momentum=momentum, nesterov=nesterov)
    if name in ("Adam", "AdamW") and not options.get("amsgrad"):
        beta_1, beta_2, epsilon = (float(options[name]) for name in ("beta_1", "beta_2", "epsilon"))
        return replace(traits, kind="adam", beta_1=beta_1, beta_2=beta_2, epsilon=epsilon)
    return traits


def part_of(whole: Array, slot: OptimizerSlot) -> Array:
    """Return this shard's part of a variable of the whole optimizer, flat."""
    flat = np.asarray(whole).reshape(-1)
    return flat if slot.start is None else flat[slot.start : slot.start + math.prod(slot.shape)]


def _cut(value: Array, members: tuple[OptimizerSlot, ...]) -> dict[int, Array]:
    borders = np.cumsum([int(np.prod(slot.shape)) for slot in members])[:-1]
    parts = np.split(value.reshape(-1), borders)
    return {slot.index: part.reshape(slot.shape) for slot, part in zip(members, parts, strict=True)}
