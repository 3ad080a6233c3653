"""Everything in a job that training changes, as one safetensors file.

========================  ==========================================================================
name                      content
========================  ==========================================================================
``weights``               the trainable variables, flat, float32, in the order of the program's layout
``optimizer/<i>``         the i-th variable of the (inner) optimizer, in Keras' order
``untrained/<i>``         the i-th entry of the program's ``untrained``: statistics, seeds, counters
``metrics``               state of the metrics, if the job's state belongs to a defined point in time: bytes of
                          :mod:`nfdt.model.training.metric_states`
========================  ==========================================================================
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.arrays.safetensors_io import (
    ArrayEntry,
    ArrayRanges,
    Pieces,
    dump_header,
    dump_parts,
    load_arrays,
)
from nfdt.core.errors import ProtocolError

WEIGHTS = "weights"
METRICS = "metrics"
GROUPS = ("optimizer", "untrained")

Contents = Literal["everything", "weights", "metrics"]
"""What is read of a state: ``weights`` has no optimizer variables, and ``metrics`` nothing else."""


@dataclass(frozen=True)
class State:
    """Weights, shape ``(P,)`` float32, the optimizer's and untrained variables by index, and the metrics' state."""

    weights: Array
    optimizer: dict[int, Array] = field(default_factory=dict)
    untrained: dict[int, Array] = field(default_factory=dict)
    metrics: bytes = b""


NO_WEIGHTS = np.zeros(0, np.float32)
"""Weights of a state without them; it leaves those of a model unchanged."""


class StateRanges:
    """A state of which only parts are read, as its tables may be larger than the memory.

    Args:
        read: Returns the bytes of some (offset, length) ranges of the file, one after the other.
        layout: Layout of all trainable variables.
        made: Those of them, by index, that the state may lack; see ``Manifest.made``.

    Raises:
        ProtocolError: the file is no state.
    """

    def __init__(
        self,
        read: Callable[[Sequence[tuple[int, int]]], bytes],
        layout: ParameterLayout,
        made: Collection[int] = (),
    ) -> None:
        file = ArrayRanges(read)
        self._read, self._layout, self._begin, self._entries = read, layout, file.begin, file.entries
        if WEIGHTS not in self._entries:
            raise ProtocolError(f"State: expected {WEIGHTS!r}. Received: {sorted(self._entries)[:8]}.")
        self._weights_at = self._begin + self._entries[WEIGHTS].start
        lacking = made if self._entries[WEIGHTS].shape != (layout.size,) else ()
        held = [index for index in range(len(layout.slots)) if index not in lacking]
        self._slots = dict(zip(held, layout.without([*lacking]).slots, strict=True))

    def without(self, tables: Collection[int], optimizer: Collection[int] | None = None) -> State:
        """Return the state with the weights outside these variables.

        Args:
            tables: The variables, by index.
            optimizer: Variables of the optimizer that are left out; None: all but scalars, and the metrics' state.

        Raises:
            ProtocolError: the file is no state.
        """
        dense = [slot for index, slot in self._slots.items() if index not in tables]
        lacking = {WEIGHTS, *(f"optimizer/{index}" for index in optimizer or ())}
        kept = {
            name: entry
            for name, entry in self._entries.items()
            if (optimizer is None and (name.startswith("untrained/") or not entry.shape))
            or (optimizer is not None and name not in lacking)
        }
        weights = ArrayEntry(np.dtype("<f4"), (sum(slot.size for slot in dense),))
        header, order = dump_header({**kept, WEIGHTS: weights})
        ranges = {name: [(self._begin + entry.start, entry.nbytes)] for name, entry in kept.items()}
        ranges[WEIGHTS] = [(self._weights_at + 4 * slot.start, 4 * slot.size) for slot in dense]
        return load_state(header + self._read([each for name in order for each in ranges[name]]))

    def rows(self, table: int, numbers: Array) -> Array:
        """Return rows of a variable of rank 2, shape ``(k, width)``, float32; zeros if the state lacks it."""
        width = self._layout.slots[table].shape[1]
        if table not in self._slots:
            return np.zeros((len(numbers), width), np.float32)
        start = self._slots[table].start
        ranges = [(self._weights_at + 4 * (start + int(n) * width), 4 * width) for n in numbers]
        return np.frombuffer(self._read(ranges) if ranges else b"", "<f4").reshape(len(numbers), width)


def dump_state(weights: Any, optimizer: Mapping[int, Any], untrained: Mapping[int, Any], metrics: bytes = b"") -> bytes:
    """Encode the state as safetensors; see the module's table."""
    return b"".join(dump_state_parts(weights, optimizer, untrained, metrics))


def dump_state_parts(
    weights: Any, optimizer: Mapping[int, Any], untrained: Mapping[int, Any], metrics: bytes = b""
) -> list[bytes | memoryview]:
    """Return the bytes of :func:`dump_state` as parts without copies; see ``safetensors_io.dump_parts``.

    The weights may be a vector, or :class:`~nfdt.core.arrays.safetensors_io.Pieces` of one.
    """
    return dump_parts(name_arrays(weights, optimizer, untrained, metrics))


def name_arrays(
    weights: Any,
    optimizer: Mapping[int, Any],
    untrained: Mapping[int, Any] = MappingProxyType({}),
    metrics: bytes = b"",
) -> dict[str, Any]:
    """Return the arrays of a state by name; see the module's table."""
    flat = weights if isinstance(weights, Pieces) else np.asarray(weights, np.float32).reshape(-1)
    named: dict[str, Any] = {WEIGHTS: flat}
    for group, members in zip(GROUPS, (optimizer, untrained), strict=True):
        named.update({f"{group}/{index}": array for index, array in members.items()})
    if metrics:
        named[METRICS] = np.frombuffer(metrics, np.uint8)
    return named


def load_state(source: bytes | memoryview | mmap.mmap | Path) -> State:
    """Inverse of :func:`dump_state`.

    Raises:
        ProtocolError: the source is no state: it has no weights, weights other than flat float32, or unknown names.
    """
    named = load_arrays(source)
    weights = named.pop(WEIGHTS, None)
    if weights is None or weights.ndim != 1 or weights.dtype != np.float32:
        received = "nothing" if weights is None else f"{weights.dtype} of shape {weights.shape}"
        raise ProtocolError(f"State: expected {WEIGHTS!r} as a float32 vector. Received: {received}.")
    metrics = named.pop(METRICS, np.zeros(0, np.uint8)).tobytes()
    groups: dict[str, dict[int, Array]] = {group: {} for group in GROUPS}
    for name, array in named.items():
        group, _, index = name.partition("/")
        if group not in groups or not index.isdecimal():
            raise ProtocolError(f"State: expected names like 'optimizer/3' or 'untrained/0'. Received: {name!r}.")
        groups[group][int(index)] = array
    return State(
        weights, **{group: dict(sorted(members.items())) for group, members in groups.items()}, metrics=metrics
    )
