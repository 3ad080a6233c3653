"""Pytrees of arrays (the x, y and sample_weight of ``fit``), split into JSON and a list of arrays.

============  ==============================================
in Python     in JSON
============  ==============================================
array         its index in the list
``None``      ``null``
list          ``[...]``
tuple         ``{"tuple": [...]}``
dict          ``{"dict": {...}}``
sparse array  ``{"sparse": [indices, values, [dim, ...]]}``
ragged array  ``{"ragged": [values, splits, ...]}``
============  ==============================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.layout import Array
from nfdt.core.errors import CaptureError, ProtocolError

MAX_DEPTH = 32
KINDS = "biufcUS"


def as_array(leaf: Any) -> Array:
    """Convert a tensor, Series, number or array to a little-endian NumPy array; texts become fixed-width strings.

    Raises:
        CaptureError: the leaf holds neither numbers, booleans nor strings.
    """
    array = np.asarray(leaf)
    # NumPy has several representations of texts; one of them is stored.
    if array.dtype.kind == "T" or (array.dtype.kind == "O" and _all_are(str, array)):
        array = array.astype(np.str_)
    elif array.dtype.kind == "O" and _all_are(bytes, array):
        array = array.astype(np.bytes_)
    elif array.dtype.kind == "V" and "bfloat16" in array.dtype.name:
        array = array.astype(np.float32)
    if array.dtype.kind not in KINDS:
        raise CaptureError(
            f"Data: expected arrays or tensors of numbers, booleans or strings. Received: {type(leaf).__name__} "
            f"of dtype {array.dtype}. Convert it first, for instance with numpy.asarray(..., dtype='float32')."
        )
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _all_are(kind: type, array: Array) -> bool:
    return array.size > 0 and all(isinstance(item, kind) for item in array.reshape(-1))


def flatten_structure(pytree: Any) -> tuple[Any, list[Array]]:
    """Split a pytree into structure and arrays; an object that occurs twice is stored once.

    Returns:
        The structure, ready for JSON, and the arrays that its numbers refer to.

    Raises:
        CaptureError: a leaf is no array, or the nesting is deeper than ``MAX_DEPTH``.
    """
    arrays: list[Array] = []
    places: dict[int, int] = {}

    def walk(node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CaptureError(f"Data: expected at most {MAX_DEPTH} levels of nesting. Received: more.")
        if node is None:
            return None
        if isinstance(node, Mapping):
            return {"dict": {_name(key): walk(value, depth + 1) for key, value in node.items()}}
        if isinstance(node, list | tuple):
            members = [walk(member, depth + 1) for member in node]
            return {"tuple": members} if isinstance(node, tuple) else members
        if isinstance(node, SparseArray):
            return {"sparse": [index_of(node.indices), index_of(node.values), list(node.shape)]}
        if isinstance(node, RaggedArray):
            return {"ragged": [index_of(part) for part in (node.values, *node.splits)]}
        return index_of(node)

    # Objects are compared by identity: ``fit(x, x)`` stores one array.
    def index_of(node: Any) -> int:
        if id(node) not in places:
            arrays.append(as_array(node))
            places[id(node)] = len(arrays) - 1
        return places[id(node)]

    return walk(pytree, 0), arrays


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise CaptureError(f"Data: expected dictionaries with names as keys. Received the key: {key!r}.")
    return key


def rebuild(structure: Any, arrays: Sequence[Any]) -> Any:
    """Inverse of :func:`flatten_structure`; ``arrays`` may be any objects, which become the leaves.

    Raises:
        ProtocolError: the structure is malformed, or refers to an array that does not exist.
    """

    def is_index(node: Any) -> bool:
        return isinstance(node, int) and not isinstance(node, bool) and 0 <= node < len(arrays)

    def walk(node: Any, depth: int) -> Any:
        if node is None:
            return None
        if is_index(node):
            return arrays[node]
        if depth < MAX_DEPTH and isinstance(node, list):
            return [walk(member, depth + 1) for member in node]
        if depth < MAX_DEPTH and isinstance(node, dict) and len(node) == 1:
            if isinstance(members := node.get("tuple"), list):
                return tuple(walk(member, depth + 1) for member in members)
            if isinstance(members := node.get("dict"), dict):
                return {key: walk(member, depth + 1) for key, member in members.items()}
            if isinstance(parts := node.get("sparse"), list) and len(parts) == 3 and all(map(is_index, parts[:2])):
                return SparseArray(arrays[parts[0]], arrays[parts[1]], _shape(parts[2]))
            if isinstance(parts := node.get("ragged"), list) and len(parts) > 1 and all(map(is_index, parts)):
                values, *splits = (arrays[part] for part in parts)
                return RaggedArray(values, tuple(splits))
        raise ProtocolError(
            f"Data structure: expected null, an array below {len(arrays)}, a list, tuple or dict, or a sparse or "
            f"ragged array. Received: {node!r}."
        )

    return walk(structure, 0)


def _shape(dimensions: Any) -> tuple[int, ...]:
    if not isinstance(dimensions, list) or not all(type(n) is int and 0 <= n < 2**63 for n in dimensions):
        raise ProtocolError(f"Data structure: expected the shape of a sparse array. Received: {dimensions!r}.")
    return tuple(dimensions)
