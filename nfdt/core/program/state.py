"""Everything of a job that changes while it trains, as one safetensors file.

========================  ==========================================================================
name                      content
========================  ==========================================================================
``weights``               the trainable variables, flat, float32, in the order of the program's layout
``optimizer/<i>``         the i-th variable of the (inner) optimizer, in Keras' order
``untrained/<i>``         the i-th entry of the program's ``untrained``: statistics, seeds, counters
========================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save

from nfdt.core.arrays import MAX_VARIABLES
from nfdt.core.errors import ProtocolError

Array = npt.NDArray[Any]

WEIGHTS = "weights"
GROUPS = ("optimizer", "untrained")


@dataclass(frozen=True)
class State:
    """Weights, shape ``(P,)`` float32, and the optimizer's and untrained variables by index."""

    weights: npt.NDArray[np.float32]
    optimizer: dict[int, Array] = field(default_factory=dict)
    untrained: dict[int, Array] = field(default_factory=dict)


def storable(array: Any) -> Array:
    """``array`` as contiguous, little-endian memory; dtypes NumPy does not know (bfloat16) become float32.

    The shape is kept, also that of a scalar, and float32 holds every bfloat16 exactly.
    """
    value = np.asarray(array)
    if value.dtype.kind not in "biufc" or value.dtype.itemsize > 8:
        value = value.astype(np.float32)
    return np.require(value.astype(value.dtype.newbyteorder("<"), copy=False), requirements="C").reshape(value.shape)


def dump_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Named arrays as safetensors; inverse of :func:`load_arrays`."""
    return bytes(save({name: storable(array) for name, array in arrays.items()}))


def load_arrays(source: bytes | Path) -> dict[str, Array]:
    """Named arrays from safetensors, in memory or in a file; they may be read-only.

    Raises:
        ProtocolError: not safetensors, an unknown dtype, or more than twice ``MAX_VARIABLES`` arrays.
    """
    try:
        found = load(bytes(source)) if not isinstance(source, Path) else load_file(source)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ProtocolError(f"State: expected safetensors. Received something else: {error}") from None
    if len(found) > 2 * MAX_VARIABLES:
        raise ProtocolError(f"State: expected at most {2 * MAX_VARIABLES} arrays. Received: {len(found)}.")
    return found


def dump_state(weights: Any, optimizer: Mapping[int, Any], untrained: Mapping[int, Any]) -> bytes:
    """The state as safetensors; see the module's table."""
    named = {WEIGHTS: np.asarray(weights, np.float32).reshape(-1)}
    for group, members in zip(GROUPS, (optimizer, untrained), strict=True):
        named.update({f"{group}/{index}": array for index, array in members.items()})
    return dump_arrays(named)


def load_state(source: bytes | Path) -> State:
    """Inverse of :func:`dump_state`.

    Raises:
        ProtocolError: not a state: no weights, weights that are not flat float32, or unknown names.
    """
    named = load_arrays(source)
    weights = named.pop(WEIGHTS, None)
    if weights is None or weights.ndim != 1 or weights.dtype != np.float32:
        received = "nothing" if weights is None else f"{weights.dtype} of shape {weights.shape}"
        raise ProtocolError(f"State: expected {WEIGHTS!r} as a float32 vector. Received: {received}.")
    groups: dict[str, dict[int, Array]] = {group: {} for group in GROUPS}
    for name, array in named.items():
        group, _, index = name.partition("/")
        if group not in groups or not index.isdecimal():
            raise ProtocolError(f"State: expected names like 'optimizer/3' or 'untrained/0'. Received: {name!r}.")
        groups[group][int(index)] = array
    return State(weights, **{group: dict(sorted(members.items())) for group, members in groups.items()})
