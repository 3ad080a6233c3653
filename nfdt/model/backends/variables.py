"""Values of Keras' variables: read, assigned, and preserved over a block."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.model.keras_internals.models import has_no_rows


def values_of(variables: Iterable[Any]) -> list[Array]:
    """Return copies of the variables' values as NumPy arrays."""
    return [np.asarray(variable.numpy()) for variable in variables]


def views_of(variables: Iterable[Any]) -> list[Array]:
    """Return the variables' values as NumPy arrays that share their memory where the backend allows it.

    TensorFlow and JAX do not write to memory while somebody holds it: such a view keeps its values. PyTorch does.
    """
    return [_view_of(variable) for variable in variables]


def _view_of(variable: Any) -> Array:
    read_value = getattr(getattr(variable, "value", None), "read_value", None)
    if read_value is not None:  # a variable of TensorFlow, whose numpy() copies
        with contextlib.suppress(TypeError, ValueError, BufferError):  # bfloat16, or memory of an accelerator
            return np.asarray(memoryview(read_value()))
    return np.asarray(variable.numpy())


class Values:
    """Values of variables at one moment, for a later look at what has changed since; copied only if necessary."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = variables
        self._held = [self._mark(view) for view in views_of(variables)]

    def changed(self) -> list[bool]:
        """Return for each variable whether its value has changed."""
        return [not self._same(held, view) for held, view in zip(self._held, views_of(self._variables), strict=True)]

    @staticmethod
    def _mark(view: Array) -> Any:
        shared = view.flags.writeable and not view.flags.owndata  # with a variable of PyTorch, which changes in place
        return _digest(view) if shared else view

    @staticmethod
    def _same(held: Any, view: Array) -> bool:
        if isinstance(held, bytes):
            return held == _digest(view)
        same_memory = held.ctypes.data == view.ctypes.data
        return same_memory or np.array_equal(held, view, equal_nan=view.dtype.kind in "fc")


def _digest(view: Array) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(view).reshape(-1).view(np.uint8).data).digest()


def assign_values(variables: Iterable[Any], values: Iterable[Any]) -> None:
    """Assign to each variable its value; both have the same order and length."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(on_devices_of(variable, value))


def on_devices_of(variable: Any, value: Any) -> Any:
    """Return a value for a variable; of one that several devices of JAX share, on each device its part only.

    ``assign`` would take an array of the host to the first device as a whole.
    """
    sharding = getattr(getattr(variable, "value", None), "sharding", None)
    if sharding is None or len(sharding.device_set) == 1:
        return value
    if isinstance(value, np.ndarray):
        value = value.astype(variable.value.dtype, copy=False)
    return keras.distribution.distribute_tensor(value, sharding)


@contextmanager
def preserved(variables: Sequence[Any]) -> Iterator[None]:
    """Restore the variables' values at the end of the block; tables on the shards have none."""
    variables = [variable for variable in variables if not has_no_rows(variable)]
    held = values_of(variables)
    try:
        yield
    finally:
        assign_values(variables, held)
