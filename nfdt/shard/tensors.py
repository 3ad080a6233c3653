"""The functions of :class:`~nfdt.shard.step.EngineOps` on tensors of TensorFlow.

Vectors pass between NumPy and TensorFlow without copies, and XLA compiles functions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from nfdt.model.backends.direct_call import Graph, of_leaves
from nfdt.shard.engine import AnchoredBf16, Vector

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_COMPILE_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError)


sqrt, abs, minimum, maximum, where = tf.sqrt, tf.abs, tf.minimum, tf.maximum, tf.where
zeros_like, zeros, sum, reshape = tf.zeros_like, tf.zeros, tf.reduce_sum, tf.reshape
given, copy = tf.convert_to_tensor, tf.identity


@functools.lru_cache(maxsize=1024)
def scalar(value: float) -> Any:
    """Return a cached constant: most values recur, and creating a constant takes as long as a small step."""
    return tf.constant(np.float32(value))  # of a Python number TensorFlow keeps the tensor for ever


def vector(array: npt.NDArray[np.float32]) -> Vector:
    """Return ``array`` as a tensor; it shares aligned and writable memory, and copies other vectors."""
    fits = array.ctypes.data % _ALIGNMENT == 0 and array.flags.c_contiguous and array.flags.writeable
    if fits and array.size:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.constant(array)


def array(vector: Vector) -> npt.NDArray[np.float32]:
    """Return a read-only view of a tensor's memory."""
    return np.frombuffer(memoryview(vector), np.float32) if vector.shape[0] else np.zeros(0, np.float32)


def read(variable: Any) -> Vector:
    """Return a Keras variable's value without a copy, and without TensorFlow's overhead for a small read.

    Later assignments do not change it: TensorFlow copies a referenced variable on write.
    """
    return tf.raw_ops.ReadVariableOp(resource=variable.value.handle, dtype=tf.float32)


def compress(vector: Vector, anchor: Vector) -> tuple[Vector, Any]:
    """Return the nearest vector that an :class:`AnchoredBf16` with ``anchor`` can represent, and its difference.

    The error is at most ``2**-8`` of the difference. Rounding uses bit operations, as a compiler may drop casts.
    """
    bits = tf.bitcast(vector - anchor, tf.int32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 16), 1)
    rounded = tf.bitcast(tf.bitwise.bitwise_and(bits + odd + 0x7FFF, -0x10000), tf.float32)
    return anchor + rounded, tf.cast(rounded, tf.bfloat16)


def decompress(vector: Any) -> Vector:
    """Return a vector or a decompressed :class:`AnchoredBf16`."""
    return vector.anchor + tf.cast(vector.difference, tf.float32) if isinstance(vector, AnchoredBf16) else vector


def concatenate(arrays: Sequence[Any]) -> Any:
    """Concatenate arrays along the first axis."""
    return tf.concat(arrays, 0)


def number(value: Any) -> Any:
    """Convert to a 0-d float32."""
    return tf.cast(tf.convert_to_tensor(value), tf.float32)


def no_difference(size: int) -> Any:
    """Return a bfloat16 difference of zeros."""
    return tf.zeros(size, tf.bfloat16)


def are_finite(values: Sequence[Any]) -> bool:
    """Whether all elements of all floating-point arrays are finite."""
    tensors = [tf.convert_to_tensor(value) for value in values]
    return all(bool(tf.reduce_all(tf.math.is_finite(t))) for t in tensors if t.dtype.is_floating)


def compiled(function: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
    """Return the function compiled by XLA; variables of TensorFlow need no list."""
    return Compiled(function)


def power(x: Any, y: Any) -> Any:
    """Return ``x ** y``, where either may be a Python number."""
    return tf.pow(tf.convert_to_tensor(x, tf.float32), tf.convert_to_tensor(y, tf.float32))


class Compiled:
    """Function compiled by XLA; if XLA cannot compile it (an unusual optimizer), it runs as a plain graph.

    Every call must pass pytrees of tensors with the same structure, shapes and types. The single graph is called
    directly, see :mod:`nfdt.model.backends.direct_call`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._graph: Graph | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the function; the first call compiles it."""
        leaves = tf.nest.flatten(args)
        return self._graph(leaves) if self._graph else self._first(of_leaves(self._function, args), leaves)

    def _first(self, flat: Callable[..., Any], leaves: list[Any]) -> Any:
        graph = self._trace(flat, leaves, jit_compile=True)
        try:
            result = graph(leaves)
        except _COMPILE_ERRORS as error:
            _log.warning("XLA cannot compile %s, running it as a graph: %s", self._function.__name__, error)
            graph = self._trace(flat, leaves)
            result = graph(leaves)
        self._graph = graph
        return result

    def _trace(self, flat: Callable[..., Any], leaves: list[Any], *, jit_compile: bool | None = None) -> Graph:
        return Graph(tf.function(flat, jit_compile=jit_compile, autograph=False).get_concrete_function(*leaves))
