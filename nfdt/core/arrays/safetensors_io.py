"""Named arrays as safetensors: the only format in which arrays are stored and sent by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save

from nfdt.core.arrays.layout import MAX_VARIABLES, Array
from nfdt.core.errors import ProtocolError


def storable(array: Any) -> Array:
    """Return ``array`` as contiguous, little-endian memory; dtypes unknown to NumPy (bfloat16) become float32.

    The shape is kept, also that of a scalar, and float32 represents every bfloat16 exactly.
    """
    value = np.asarray(array)
    if value.dtype.kind not in "biufc" or value.dtype.itemsize > 8:
        value = value.astype(np.float32)
    return np.require(value.astype(value.dtype.newbyteorder("<"), copy=False), requirements="C").reshape(value.shape)


def dump_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Encode named arrays as safetensors; inverse of :func:`load_arrays`."""
    return bytes(save({name: storable(array) for name, array in arrays.items()}))


_NAMES = {"b": "BOOL", "i": "I", "u": "U", "f": "F", "c": "C"}  # safetensors' names; all but BOOL get the bits appended


def dump_parts(arrays: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Return the bytes of :func:`dump_arrays` in parts, which are the memory of the arrays themselves where possible.

    This avoids copies of large arrays.
    """
    kept = {name: storable(array) for name, array in arrays.items()}
    kept = dict(sorted(kept.items(), key=lambda item: (-item[1].itemsize, item[0])))  # so that all are aligned
    header: dict[str, Any] = {}
    at = 0
    for name, array in kept.items():
        kind = array.dtype.kind
        dtype = _NAMES[kind] if kind == "b" else f"{_NAMES[kind]}{8 * array.itemsize}"
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    contents = [array.reshape(-1).view(np.uint8).data for array in kept.values() if array.nbytes]
    return [len(text).to_bytes(8, "little") + text, *contents]


def load_arrays(source: bytes | Path) -> dict[str, Array]:
    """Return named arrays from safetensors, in memory or in a file; they may be read-only.

    Raises:
        ProtocolError: the source is not safetensors, has an unknown dtype, or more than twice ``MAX_VARIABLES`` arrays.
    """
    try:
        found = load(bytes(source)) if not isinstance(source, Path) else load_file(source)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ProtocolError(f"Arrays: expected safetensors. Received something else: {error}") from None
    if len(found) > 2 * MAX_VARIABLES:
        raise ProtocolError(f"Arrays: expected at most {2 * MAX_VARIABLES} arrays. Received: {len(found)}.")
    return found
