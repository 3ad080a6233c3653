"""Comparison of the fits of two runs of a script: their epochs, the names in their histories, and all values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Distance that values may have from those of the plain run.

    Attributes:
        relative: Part of the plain value's magnitude; of an array, of its largest element's.
        absolute: Further difference, in the unit of the value.
        of_history: Whether the magnitude is the largest of all epochs: where values fall steeply, a step's delay is
            much of the present one.
    """

    relative: float
    absolute: float
    of_history: bool = False

    @classmethod
    def of(cls, workers: int) -> Tolerance:
        """Return that of a number of workers: several compute gradients on other weights than one does."""
        return cls(0.05, 0.02) if workers == 1 else cls(0.25, 0.05, of_history=True)


def difference(expected: list[dict[str, Any]], received: list[dict[str, Any]], tolerance: Tolerance) -> str:
    """Return how the fits of a distributed script differ from those of the plain one; "": they do not.

    Args:
        expected: Fits of the plain script, each with ``epochs``, their numbers, and ``logs``, pairs of a name and its
            values in the epochs, in the history's order.
        received: Fits of the distributed script.
        tolerance: How far values may be apart.
    """
    if len(expected) != len(received):
        return f"{len(expected)} fits plain, {len(received)} distributed"
    found = (
        f"fit {number}: {text}"
        for number, fits in enumerate(zip(expected, received, strict=True), 1)
        for text in _differences(*fits, tolerance)
    )
    return next(found, "")


def _differences(one: dict[str, Any], other: dict[str, Any], tolerance: Tolerance) -> Iterator[str]:
    if one["epochs"] != other["epochs"]:
        yield f"epochs {one['epochs']} plain, {other['epochs']} distributed"
    names, found = ([name for name, _ in fit["logs"]] for fit in (one, other))
    if names != found:
        yield f"logs {names} plain, {found} distributed"
    logs = dict(other["logs"])
    for name, values in one["logs"]:
        if len(values) != len(logs[name]):
            yield f"{name}: {len(values)} values plain, {len(logs[name])} distributed"
        for epoch, (value, distributed) in enumerate(zip(values, logs[name], strict=False), 1):
            if not _close(value, distributed, tolerance, values if tolerance.of_history else [value]):
                yield f"{name} of epoch {epoch}: {_shown(value)} plain, {_shown(distributed)} distributed"


def _close(one: Any, other: Any, tolerance: Tolerance, history: Sequence[Any]) -> bool:
    """Whether two values, scalars or arrays, are equal within the tolerance for a history.

    Plain values that are not finite are not compared: gradients that are not finite are dropped when distributed.
    """
    plain, distributed = np.asarray(one), np.asarray(other)
    if plain.shape != distributed.shape or plain.dtype.kind in "US":
        return plain.shape == distributed.shape and bool(np.all(plain == distributed))
    compared = np.isfinite(plain)
    magnitude = max(float(np.max(np.abs(each[np.isfinite(each)]), initial=0.0)) for each in map(np.asarray, history))
    limit = tolerance.relative * magnitude + tolerance.absolute
    return bool(np.all(np.abs(distributed[compared] - plain[compared]) <= limit))


def _shown(value: Any) -> str:
    return np.array2string(np.asarray(value), precision=4, separator=", ", threshold=6)
