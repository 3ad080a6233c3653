"""The untrained state that all workers share from epoch to epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nfdt.core.training.merge import Array, decode_arrays, encode_arrays, merge_untrained


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
        self._shown: list[Array] | None = None
        self.metrics = b""

    @property
    def current(self) -> list[Array]:
        """The current shared state, in the program's order."""
        return self._base if self._shown is None else self._shown

    @property
    def encoded(self) -> bytes:
        """The shared state as safetensors; empty while it equals the state in the workers' programs."""
        return b"" if self._initial or not self._rules else encode_arrays(self._base)

    def merge(self, states: Iterable[tuple[int, int, bytes]]) -> None:
        """Replace the shared state by the merge of (worker index, steps, safetensors)."""
        decoded = [(index, steps, decode_arrays(data)) for index, steps, data in states]
        if decoded and self._rules:
            self.replace(merge_untrained(self._rules, self._base, decoded))

    def show(self, states: Iterable[tuple[int, int, bytes]], metrics: bytes) -> None:
        """Publish state and metrics in the middle of an epoch; the workers continue with their own."""
        decoded = [(index, steps, decode_arrays(data)) for index, steps, data in states]
        if decoded and self._rules:
            self._shown = merge_untrained(self._rules, self._base, decoded)
        self.metrics = metrics

    def replace(self, arrays: Sequence[Array]) -> None:
        """Replace the shared state, for instance by values that a callback has set."""
        self._base, self._shown = list(arrays), None
        self._initial = False
