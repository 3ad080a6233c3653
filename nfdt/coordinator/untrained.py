"""The untrained state that all workers share from epoch to epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nfdt.core.errors import ShapeMismatch
from nfdt.model.training.merge import (
    MOST_GIVEN_BYTES,
    Array,
    WorkerState,
    decode_arrays,
    encode_arrays,
    kept_apart,
    merge_untrained,
    unchanged,
)


class StateMerger:
    """State from which every worker started the epoch; merges the states that the workers return.

    Attributes:
        metrics: Merged metric variables of all workers, for the last epoch (for its validation, if there was one),
            or up to the current pause; empty during training.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]] = (), base: Sequence[Array] = ()) -> None:
        self._rules = rules
        self._base = list(base)
        # variables that no longer have the values of the program; a restarted job's state may have data of the script
        self._changed = {i for i, rule in enumerate(rules) if rule["rule"] == "given" and np.size(self._base[i])}
        self._initial = not self._changed
        self._shown: list[Array] | None = None
        self._apart: set[int] = set()  # variables of optimizers that workers keep to themselves
        self.metrics = b""

    @property
    def current(self) -> list[Array]:
        """The current shared state, in the program's order."""
        return self._base if self._shown is None else self._shown

    @property
    def encoded(self) -> bytes:
        """The shared state as safetensors, without large variables that have never changed.

        Empty while it equals the state in the workers' programs.
        """
        if self._initial or not self._rules:
            return b""
        left_out = {i for i in range(len(self._base)) if i not in self._changed} | self._apart
        return encode_arrays(self._base, left_out)

    def check(self, untrained: Mapping[int, Array]) -> None:
        """Raise ShapeMismatch unless these are all variables, by index, in the shapes of the program.

        Data of the script are bytes of any number up to :data:`MOST_GIVEN_BYTES`.
        """
        given = {i for i, rule in enumerate(self._rules) if rule["rule"] == "given"}
        expected = {i: base.shape for i, base in enumerate(self._base) if i not in given}
        received = {i: array.shape for i, array in untrained.items() if i not in given}
        if expected != received or not given <= untrained.keys():
            shapes = [list(shapes.values())[:8] for shapes in (expected, received)]
            raise ShapeMismatch(f"State: expected untrained shapes {shapes[0]}. Received: {shapes[1]}.")
        for i in given:
            array = untrained[i]
            if array.dtype != np.uint8 or array.ndim != 1 or array.nbytes > MOST_GIVEN_BYTES:
                raise ShapeMismatch(
                    f"State: expected data of the script as at most {MOST_GIVEN_BYTES} bytes. Received: {array.dtype} "
                    f"of shape {array.shape}."
                )

    def settle(self) -> None:
        """Continue from the state that was published last."""
        if self._shown is not None:
            apart = self._apart
            self.replace(self._shown)
            self._apart = apart

    def _decoded(self, states: Iterable[tuple[int, int, bytes]]) -> list[WorkerState]:
        """Decode what workers sent; large variables that they left out are as they got them."""
        nothing = [None] * len(self._base)
        return [(index, steps, decode_arrays(data, nothing)) for index, steps, data in states]

    def show(self, states: Iterable[tuple[int, int, bytes]], metrics: bytes) -> None:
        """Publish the merge of (worker index, steps, safetensors), and metrics; the workers continue with their own."""
        decoded = self._decoded(states)
        if decoded and self._rules:
            self._shown = merge_untrained(self._rules, self._base, decoded)
            self._apart = kept_apart(self._rules, decoded)
        self.metrics = metrics

    def replace(self, arrays: Sequence[Array]) -> None:
        """Replace the shared state, for instance by values that a callback has set."""
        self._changed |= set(range(len(arrays))) - unchanged(arrays, self._base)
        self._base, self._shown, self._apart = list(arrays), None, set()
        self._initial = False
