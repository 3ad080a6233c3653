"""The functions of :class:`~nfdt.shard.step.EngineOps` on arrays of JAX, which never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
import numpy.typing as npt
from jax import numpy as jnp

from nfdt.shard.engine import AnchoredBf16, Vector

sqrt, abs, minimum, maximum, power = jnp.sqrt, jnp.abs, jnp.minimum, jnp.maximum, jnp.power
zeros_like, zeros, sum, reshape, concatenate = jnp.zeros_like, jnp.zeros, jnp.sum, jnp.reshape, jnp.concatenate
where: Any = jnp.where
given, vector, scalar = jnp.asarray, jnp.array, np.float32


def number(value: Any) -> Any:
    """Convert to a 0-d float32."""
    return jnp.asarray(keras.ops.convert_to_tensor(value), jnp.float32)


def copy(vector: Vector) -> Vector:
    """Return the vector itself: arrays of JAX never change."""
    return vector


def array(vector: Vector) -> npt.NDArray[Any]:
    """Return a view of the vector."""
    return np.asarray(vector)


def read(variable: Any) -> Vector:
    """Return a variable's value, which assignments replace and do not change."""
    return variable.value


def compress(vector: Vector, anchor: Vector) -> tuple[Vector, Any]:
    """Round the bits as on TensorFlow, because XLA may drop casts."""
    bits = jax.lax.bitcast_convert_type(vector - anchor, jnp.int32)
    odd = (bits >> 16) & 1
    rounded = jax.lax.bitcast_convert_type((bits + odd + 0x7FFF) & -0x10000, jnp.float32)
    return anchor + rounded, rounded.astype(jnp.bfloat16)


def decompress(vector: Any) -> Vector:
    """Return a vector or a decompressed :class:`~nfdt.shard.engine.AnchoredBf16`."""
    if not isinstance(vector, AnchoredBf16):
        return vector
    return vector.anchor + jnp.asarray(vector.difference, jnp.float32)


def no_difference(size: int) -> Any:
    """Return a bfloat16 difference of zeros."""
    return jnp.zeros(size, jnp.bfloat16)


def are_finite(values: Sequence[Any]) -> bool:
    """Whether all elements of all floating-point arrays are finite."""
    arrays = [jnp.asarray(value) for value in values]
    return all(bool(jnp.isfinite(a).all()) for a in arrays if jnp.issubdtype(a.dtype, jnp.floating))


def compiled(function: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
    """Return the compiled function; the variables' values are passed to it, and it returns the new ones."""

    @jax.jit
    def pure(values: list[Any], args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))) as scope:
            result = function(*args)
        return result, [scope.get_current_value(variable) for variable in variables]

    def run(*args: Any) -> Any:
        result, values = pure([variable.value for variable in variables], args)
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return result

    return run
