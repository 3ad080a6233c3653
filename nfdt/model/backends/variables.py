"""Values of Keras' variables: read, assigned, and preserved over a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array


def values_of(variables: Iterable[Any]) -> list[Array]:
    """Return copies of the variables' values as NumPy arrays."""
    return [np.asarray(variable.numpy()) for variable in variables]


def assign_values(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assign to each variable its value; both have the same order and length."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@contextmanager
def preserved(variables: Sequence[Any]) -> Iterator[None]:
    """Restore the variables' values at the end of the block."""
    held = values_of(variables)
    try:
        yield
    finally:
        assign_values(variables, held)
