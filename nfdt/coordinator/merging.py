"""The state that is not trained, as all workers share it from epoch to epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nfdt.core.training.merge import Array, decode_arrays, encode_arrays, merge_metrics, merge_untrained


class StateMerger:
    """Holds what every worker started the epoch from, and merges what they come back with."""

    def __init__(self, rules: Sequence[Mapping[str, Any]] = (), base: Sequence[Array] = ()) -> None:
        self._rules = rules
        self._base = list(base)
        self._initial = True

    @property
    def current(self) -> list[Array]:
        """The shared state now, in the program's order."""
        return self._base

    @property
    def encoded(self) -> bytes:
        """The shared state as safetensors; empty while it is still what the workers' programs hold."""
        return b"" if self._initial or not self._rules else encode_arrays(self._base)

    def merge(self, states: Iterable[tuple[int, int, bytes]]) -> None:
        """Replace the shared state by the merge of (worker index, steps, safetensors)."""
        decoded = [(index, steps, decode_arrays(data)) for index, steps, data in states]
        if decoded and self._rules:
            self.replace(merge_untrained(self._rules, self._base, decoded))

    def replace(self, arrays: Sequence[Array]) -> None:
        """Replace the shared state, for instance by what a callback has set."""
        self._base = list(arrays)
        self._initial = False


def merged_metrics(states: Sequence[bytes]) -> bytes:
    """The sum of metric variables (each safetensors); empty for none."""
    return encode_arrays(merge_metrics([decode_arrays(s) for s in states])) if states else b""
