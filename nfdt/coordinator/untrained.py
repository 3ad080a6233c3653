"""The untrained state that all workers share from epoch to epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nfdt.core.training.merge import Array, WorkerState, decode_arrays, encode_arrays, merge_untrained, unchanged


class StateMerger:
    """State from which every worker started the epoch; merges the states that the workers return.

    Attributes:
        metrics: Merged metric variables of all workers, for the last epoch (for its validation, if there was one),
            or up to the current pause; empty during training.
    """

    def __init__(self, rules: Sequence[Mapping[str, Any]] = (), base: Sequence[Array] = ()) -> None:
        self._rules = rules
        self._base = list(base)
        self._initial = True
        self._changed: set[int] = set()  # variables that no longer have the values of the program
        self._shown: list[Array] | None = None
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
        return encode_arrays(self._base, [i for i in range(len(self._base)) if i not in self._changed])

    def merge(self, states: Iterable[tuple[int, int, bytes]]) -> None:
        """Replace the shared state by the merge of (worker index, steps, safetensors)."""
        decoded = self._decoded(states)
        if decoded and self._rules:
            self.replace(merge_untrained(self._rules, self._base, decoded))

    def _decoded(self, states: Iterable[tuple[int, int, bytes]]) -> list[WorkerState]:
        """Decode what workers sent; large variables that they left out are as they got them."""
        return [(index, steps, decode_arrays(data, self._base)) for index, steps, data in states]

    def show(self, states: Iterable[tuple[int, int, bytes]], metrics: bytes) -> None:
        """Publish state and metrics in the middle of an epoch; the workers continue with their own."""
        decoded = self._decoded(states)
        if decoded and self._rules:
            self._shown = merge_untrained(self._rules, self._base, decoded)
        self.metrics = metrics

    def replace(self, arrays: Sequence[Array]) -> None:
        """Replace the shared state, for instance by values that a callback has set."""
        self._changed |= set(range(len(arrays))) - unchanged(arrays, self._base)
        self._base, self._shown = list(arrays), None
        self._initial = False
