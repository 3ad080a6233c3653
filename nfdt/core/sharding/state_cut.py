"""Division of a job's state among its shards, and its reassembly. Pure: no Keras, no network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.errors import ShapeMismatch
from nfdt.core.program.state import State

StatePart = tuple[Array, dict[int, Array]]
"""One shard's weights, and of the optimizer's variables what it holds, by index."""


class StateCut:
    """Division of a state into one part per shard.

    Args:
        layout: Layout of all trainable variables.
        shards: Number of shards.
        owners: See :attr:`nfdt.core.program.manifest.Manifest.optimizer_owners`.
    """

    def __init__(self, layout: ParameterLayout, shards: int, owners: Sequence[int] | None) -> None:
        self._layout, self._owners = layout, owners
        self._runs = layout.cut(shards)

    def size(self, index: int) -> int:
        """Return the number of weights of this shard."""
        return self._runs[index].size

    def check(self, state: State) -> None:
        """Raise ShapeMismatch unless the state has the model's weights."""
        if state.weights.shape != (self._layout.size,):
            raise ShapeMismatch(f"State: expected {self._layout.size} weights. Received: {state.weights.size}.")

    def own(self, state: State, index: int) -> StatePart:
        """Return a shard's part: its weights, its variables' whole optimizer variables, and those without owner."""
        own = {-1, *(piece.variable for piece in self._runs[index].pieces)}
        owners = self._owners or [-1] * (max(state.optimizer, default=-1) + 1)
        optimizer = {i: array for i, array in state.optimizer.items() if i < len(owners) and owners[i] in own}
        return state.weights[self._runs[index].elements], optimizer

    def joined(self, parts: Sequence[StatePart]) -> State:
        """Return the whole state from the parts of all shards, in order; each part has the variables without owner."""
        flat = [weights.reshape(-1) for weights, _ in parts]
        weights = (flat[0] if len(flat) == 1 else np.concatenate(flat)).astype(np.float32, copy=False)
        found: dict[int, list[Array]] = {}
        for _, optimizer in parts:
            for index, array in optimizer.items():
                found.setdefault(index, []).append(array)
        return State(weights, optimizer={index: self._joined(index, arrays) for index, arrays in found.items()})

    def _joined(self, index: int, arrays: list[Array]) -> Array:
        owner = self._owners[index] if self._owners and index < len(self._owners) else -1
        if owner < 0 or len(arrays) == 1:
            return arrays[0]
        return np.concatenate([array.reshape(-1) for array in arrays]).reshape(self._layout.slots[owner].shape)
