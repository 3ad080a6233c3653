"""Merge of the untrained state of several workers: pure NumPy, one rule per kind.

=========  ===================================================================================================
rule       merged value
=========  ===================================================================================================
``ema``    BatchNorm's moving statistics, decay ``a``: the ``K = sum k_i`` updates of all workers in one chain
``seed``   worker 0's (the lowest index present); the other workers keep their own
``max``    counters: the elementwise maximum
``sum``    counters of updates: ``base`` and the increases of all workers
``mean``   other floats: the mean weighted by the number of steps of each worker
``given``  ``base``: only the script changes it, and its length may change
=========  ===================================================================================================

EMA: worker i turned ``base`` into ``m_i = a^k_i base + (1 - a^k_i) x_i`` in ``k_i`` steps, where ``x_i`` is the mean
of its batch statistics. The same steps in sequence on one machine give ``a^K base + (1 - a^K) x`` with ``x`` the
mean of the ``x_i`` weighted by ``k_i`` (exactly where each worker's batch statistics are constant).

If one worker did all the steps, the result is its own state bit for bit, whatever the rule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import ProtocolError, ShapeMismatch

WorkerState = tuple[int, int, Sequence[Array | None]]

LARGE_BYTES = 2**16
MOST_GIVEN_BYTES = 16 * 2**20  # of the rule ``given``; each epoch's first message has them

RULES = ("ema", "seed", "max", "sum", "mean", "given")


def merge_untrained(
    rules: Sequence[Mapping[str, Any]], base: Sequence[Array], states: Sequence[WorkerState]
) -> list[Array]:
    """Merge the workers' untrained variables.

    Args:
        rules: ``{"rule": one of :data:`RULES`, "decay": float | None}`` of each variable; those of an optimizer have
            its number and its applications in a step, ``"optimizer"`` and ``"applications"``.
        base: Value of each variable from which the workers started.
        states: (worker index, steps done since ``base``, the worker's variables), in any order; None instead of a
            variable that is as it was given.

    Returns:
        New list of the merged variables, shapes and dtypes of ``base``; ``base`` itself if no worker did a step.

    Raises:
        ShapeMismatch: a worker sent another number of variables, or another shape.
    """
    for index, _, arrays in states:
        _check_shapes(index, base, arrays)
    apart = kept_apart(rules, states)
    states = [
        (index, done, [b if a is None or i in apart else a for i, (a, b) in enumerate(zip(arrays, base, strict=True))])
        for index, done, arrays in states
    ]
    own_steps = _steps_of_optimizers(rules, base, states)
    return [
        _merged(
            rule,
            np.asarray(base[i]),
            [(s[0], own_steps.get(rule.get("optimizer"), {}).get(s[0], s[1]), s[2][i]) for s in states],
        )
        for i, rule in enumerate(rules)
    ]


def _merged(rule: Mapping[str, Any], base: Array, values: Sequence[tuple[int, int, Any]]) -> Array:
    """Merge the values of a variable, each with its worker and the worker's steps since ``base``."""
    active = sorted((value for value in values if value[1] > 0), key=lambda value: value[0])
    if not active:
        return base
    if len(active) == 1:
        return np.asarray(active[0][2])
    return _merge_one(rule, base, [np.asarray(array) for _, _, array in active], [steps for _, steps, _ in active])


def kept_apart(rules: Sequence[Mapping[str, Any]], states: Sequence[WorkerState]) -> set[int]:
    """Return the variables of those optimizers that a worker has kept to itself: none of a group is merged.

    The counter of an optimizer, its first variable, is always reported with the others.
    """
    groups: dict[int, list[int]] = {}
    for i, rule in enumerate(rules):
        if rule.get("optimizer") is not None:
            groups.setdefault(rule["optimizer"], []).append(i)
    return {i for own in groups.values() if any(arrays[own[0]] is None for _, _, arrays in states) for i in own}


def _steps_of_optimizers(
    rules: Sequence[Mapping[str, Any]], base: Sequence[Array], states: Sequence[WorkerState]
) -> dict[int | None, dict[int, int]]:
    """Return the steps of each worker that each optimizer has counted since ``base``, by its number.

    A worker may have kept it to itself before, and have made no step since the other variables were given.
    """
    found: dict[int | None, dict[int, int]] = {}
    for i, rule in enumerate(rules):
        number = rule.get("optimizer")
        if number is not None and number not in found and rule["rule"] == "sum":
            found[number] = {
                index: int(np.asarray(arrays[i]) - base[i]) // max(1, rule["applications"])
                for index, _, arrays in states
            }
    return found


def encode_arrays(arrays: Sequence[Any], left_out: Collection[int] = ()) -> bytes:
    """Encode a list of arrays as safetensors with the names "0", "1", ..., without those of some indices."""
    return dump_arrays({str(i): array for i, array in enumerate(arrays) if i not in left_out})


def encode_changed(arrays: Sequence[Any], base: Sequence[Any]) -> bytes:
    """Encode arrays without the large ones that are equal to those of ``base``, such as frozen weights."""
    return encode_arrays(arrays, unchanged(arrays, base))


def unchanged(arrays: Sequence[Any], base: Sequence[Any]) -> set[int]:
    """Return the indices of large arrays that have the bytes of those of ``base``."""
    return {
        i for i, (array, held) in enumerate(zip(arrays, base, strict=True)) if is_large(array) and _same(array, held)
    }


def is_large(array: Any) -> bool:
    """Return whether an array is worth leaving out of a message that need not have it."""
    return bool(np.asarray(array).nbytes >= LARGE_BYTES)


def _same(one: Any, other: Any) -> bool:
    return one is other or np.asarray(one).tobytes() == np.asarray(other).tobytes()


def decode_arrays(data: bytes, base: Sequence[Any] = ()) -> list[Any]:
    """Inverse of :func:`encode_arrays`; those left out are taken from ``base``. Empty data is an empty list.

    Raises:
        ProtocolError: the data is not safetensors, or has names other than "0", "1", ...
    """
    named = {**{str(i): array for i, array in enumerate(base)}, **load_arrays(data)} if data else {}
    try:
        return [named[str(i)] for i in range(len(named))]
    except KeyError:
        raise ProtocolError(f"Arrays: expected names '0', '1', ... Received: {sorted(named)[:5]}.") from None


def _merge_one(rule: Mapping[str, Any], base: Array, values: list[Array], steps: list[int]) -> Array:
    name = rule["rule"]
    if name == "given":
        return base
    if name == "seed":
        return values[0]
    if name == "sum":
        return np.asarray(base + sum(v - base for v in values), base.dtype)
    if name == "max" or base.dtype.kind in "biu":
        return np.maximum.reduce(values)
    if all(_same(v, base) for v in values):
        return base
    wide = [v.astype(np.float64) for v in values]
    start = base.astype(np.float64)
    merged = _compose_ema(float(rule["decay"]), start, wide, steps) if name == "ema" else _mean(start, wide, steps)
    return np.asarray(merged).astype(base.dtype)


def _compose_ema(decay: float, base: Array, values: list[Array], steps: list[int]) -> Array:
    if decay >= 1.0:
        return base
    targets = [base + (v - base) / _released(decay, k) for v, k in zip(values, steps, strict=True)]
    return base + _released(decay, sum(steps)) * (_mean(base, targets, steps) - base)


def _released(decay: float, steps: int) -> float:
    """Return ``1 - decay**steps`` without cancellation."""
    return -math.expm1(steps * math.log(decay)) if decay > 0.0 else 1.0


def _mean(base: Array, values: list[Array], steps: list[int]) -> Array:
    shares = [k / sum(steps) for k in steps]
    return base + sum(share * (v - base) for share, v in zip(shares, values, strict=True))


def _check_shapes(worker: int, base: Sequence[Array], arrays: Sequence[Array | None]) -> None:
    expected = [np.shape(held) for held in base]
    received = [
        want if array is None else np.shape(array) for array, want in zip_longest(arrays, expected, fillvalue=())
    ]
    if len(arrays) != len(base) or received != expected:
        raise ShapeMismatch(
            f"Untrained state of worker {worker}: expected {len(expected)} variables of shapes {expected[:8]}. "
            f"Received: {len(received)} of shapes {received[:8]}. It runs another model; restart it."
        )
