"""Outputs of the user's own ``predict_step`` for several batches, as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import ProtocolError

OUTPUT_BYTES = 8 * 2**20
"""Size of an answer after which a worker predicts no further batch before it sends it."""

MAX_OUTPUT_BYTES = 48 * 2**20
"""Size limit of the outputs of one batch, which travel in one message (decision 51)."""

PredictStep = Callable[[Any, Any], list[Array]]
"""A prediction step: the leaves of the outputs at flat weights, shape ``(P,)`` float32, for a batch."""

Outputs = Mapping[int, Sequence[Array]]
"""Leaves of the outputs of each batch, by its first row."""


def dump_outputs(outputs: Outputs) -> bytes:
    """Encode the outputs of batches; inverse of :func:`load_outputs`."""
    return dump_arrays({f"{row}/{i}": leaf for row, leaves in outputs.items() for i, leaf in enumerate(leaves)})


def load_outputs(encoded: bytes) -> dict[int, list[Array]]:
    """Return the outputs of batches.

    Raises:
        ProtocolError: these are no outputs.
    """
    arrays = load_arrays(encoded)
    found: dict[int, dict[int, Array]] = {}
    try:
        for name, array in arrays.items():
            row, _, leaf = name.partition("/")
            found.setdefault(int(row), {})[int(leaf)] = array
        return {row: [leaves[i] for i in range(len(leaves))] for row, leaves in found.items()}
    except (ValueError, KeyError):
        raise ProtocolError(f"Outputs: expected arrays named ROW/LEAF. Received: {sorted(arrays)[:8]}.") from None


def join_outputs(pieces: Iterable[Outputs], rows: Sequence[int]) -> list[Array]:
    """Return the leaves of the outputs of all batches.

    Args:
        pieces: Outputs of some batches each.
        rows: First row of each batch, in order.

    Raises:
        ProtocolError: batches are missing, or have other outputs than the first one.
    """
    batches = {row: leaves for piece in pieces for row, leaves in piece.items()}
    counts = {len(leaves) for leaves in batches.values()}
    if batches.keys() != set(rows) or len(counts) != 1:
        raise ProtocolError(
            f"Outputs: expected those of {len(rows)} batches, as many of each. Received: {len(batches)} batches with "
            f"{sorted(counts)} outputs, beginning at the rows {sorted(batches)[:8]}."
        )
    return [np.concatenate(leaves) for leaves in zip(*(batches[row] for row in rows), strict=True)]
