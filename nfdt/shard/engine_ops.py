"""Functions of the backend that the engine for Keras optimizers runs on: TensorFlow, or JAX in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import numpy.typing as npt

from nfdt.shard.engine import Vector
from nfdt.update_rules.base import ArrayOps


class EngineOps(ArrayOps, Protocol):
    """Functions on the backend's arrays, in addition to those that rules may call."""

    def scalar(self, value: float) -> Any:
        """Return a 0-d float32 array."""
        ...

    def number(self, value: Any) -> Any:
        """Return a 0-d array, a variable's value or a Python number as float32."""
        ...

    def given(self, value: Any) -> Any:
        """Return an array as one of the backend."""
        ...

    def zeros(self, size: int) -> Vector:
        """Return a vector of zeros."""
        ...

    def copy(self, vector: Vector) -> Vector:
        """Return a vector that shares no memory with a variable."""
        ...

    def vector(self, array: npt.NDArray[Any]) -> Vector:
        """Return an array from outside as a vector, without a copy where that is safe."""
        ...

    def array(self, vector: Vector) -> npt.NDArray[Any]:
        """Return a read-only view of a vector."""
        ...

    def read(self, variable: Any) -> Vector:
        """Return a variable's value, which later assignments do not change."""
        ...

    def compress(self, vector: Vector, anchor: Vector) -> tuple[Vector, Any]:
        """Return the nearest vector that a bfloat16 difference to an anchor represents, and that difference."""
        ...

    def decompress(self, vector: Any) -> Vector:
        """Return a vector or a decompressed :class:`~nfdt.shard.engine.AnchoredBf16`."""
        ...

    def no_difference(self, size: int) -> Any:
        """Return a bfloat16 difference of zeros."""
        ...

    def are_finite(self, values: Sequence[Any]) -> bool:
        """Return whether all elements of all floating-point arrays are finite."""
        ...

    def compiled(self, function: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
        """Return a function compiled by XLA that may read and assign these Keras variables."""
        ...


def ops_of_backend() -> EngineOps:
    """Return the functions of the backend that Keras has loaded."""
    if keras.backend.backend() == "jax":
        from nfdt.shard.jax_ops import JaxOps

        return JaxOps()
    from nfdt.shard.tensors import TensorOps

    return TensorOps()
