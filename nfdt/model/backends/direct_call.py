"""Calls of traced functions without the overhead of ``tf.function``.

``tf.function`` binds and checks its arguments, and looks the graph up by them. This takes 0.2 to 0.3 ms, as long as a
step of a small model. Here the graph is found by the shapes of the batch alone, and is called with a list of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.model.backends.contract import PreparedBatch, to_tensor


class Graph:
    """One graph, traced for tensors of certain shapes and types.

    Args:
        concrete: Result of ``get_concrete_function`` for a function of tensors, none of them nested.
    """

    def __init__(self, concrete: Any) -> None:
        self._concrete = concrete  # keeps the graph alive
        self._captured = list(concrete.captured_inputs)
        self._call: Callable[[list[Any]], Any] = concrete.inference_fn.call_preflattened

    def __call__(self, tensors: Sequence[Any]) -> Any:
        """Run the graph. The tensors must have its shapes and types, and no gradient tape may be active."""
        return self._call([*tensors, *self._captured])


def of_leaves(function: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """Convert ``function`` of pytrees like ``arguments`` to a function of their leaves, except those that are None."""
    places = tf.nest.map_structure(lambda leaf: leaf is not None, arguments)

    def flat(*leaves: Any) -> Any:
        left = iter(leaves)
        return function(*tf.nest.map_structure(lambda there: next(left) if there else None, places))

    flat.__name__ = getattr(function, "__name__", "flat")
    return flat


def leaves_of(pytree: Any) -> list[Any]:
    """Return the leaves of a pytree, except those that are None."""
    return [leaf for leaf in tf.nest.flatten(pytree) if leaf is not None]


def components_of(tensors: Any) -> list[Any]:
    """Return the dense tensors that these consist of, in the order in which graphs take them."""
    return list(tf.nest.flatten(tensors, expand_composites=True))


@dataclass(frozen=True)
class Prepared(PreparedBatch):
    """A batch: the original pytree, its leaves as tensors (copied where needed), and its structure and shapes.

    ``components`` are the leaves, with sparse and ragged ones replaced by the dense tensors that they consist of.
    """

    components: list[Any]
    shapes: Hashable


class DirectCall:
    """A function of weights, a batch (a pytree of arrays) and 0-d tensors, with one cached graph per batch shape.

    The first call with new shapes asks ``tf.function`` for its graph, which it traces if necessary.

    Args:
        function: The function to call; ``weights`` always has the same shape.
        wrap: Makes a ``tf.function`` of a function of tensors; None: the function is called eagerly.
    """

    def __init__(self, function: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Any] | None) -> None:
        self._function = function
        self._wrap = wrap
        self._traced: dict[Hashable, Any] = {}
        self._graphs: dict[Hashable, Graph] = {}

    @property
    def traces(self) -> int:
        """Number of traces of the function; 0 when it runs eagerly."""
        return sum(int(traced.experimental_get_tracing_count()) for traced in self._traced.values())

    @staticmethod
    def prepare(batch: Any) -> Prepared:
        """Prepare a pytree of arrays for a later call."""
        tensors = [to_tensor(leaf) for leaf in leaves_of(batch)]
        return Prepared(batch, tensors, components_of(tensors), _shapes(batch))

    def __call__(self, weights: Any, batch: Prepared, *scalars: Any) -> Any:
        """Call the function; ``scalars`` are tensors of the same types in every call."""
        weights = tf.convert_to_tensor(weights)
        graph = self._graphs.get(batch.shapes)
        if graph is not None and not tf.config.functions_run_eagerly():
            return graph([weights, *batch.components, *scalars])
        tensors = [weights, *batch.tensors, *scalars]
        arguments = (weights, batch.pytree, *scalars)
        if self._wrap is None:
            return of_leaves(self._function, arguments)(*tensors)
        structure = _structure(batch.shapes)
        if structure not in self._traced:
            self._traced[structure] = self._wrap(of_leaves(self._function, arguments))
        if tf.config.functions_run_eagerly():
            return self._traced[structure](*tensors)
        # Not by a call: TensorFlow warns of functions whose calls trace often, as the first of each job does.
        graph = self._graphs[batch.shapes] = Graph(self._traced[structure].get_concrete_function(*tensors))
        return graph([weights, *batch.components, *scalars])


@dataclass(frozen=True)
class _Leaf:
    shape: Hashable
    dtype: Hashable


def _shapes(pytree: Any) -> Hashable:
    """Return the pytree as nested tuples with a ``_Leaf`` in place of every array, or its ``tf.TypeSpec``."""
    if pytree is None:
        return None
    if isinstance(pytree, dict):
        return dict, *((name, _shapes(pytree[name])) for name in sorted(pytree))
    if isinstance(pytree, tuple | list):
        return type(pytree), *map(_shapes, pytree)
    if isinstance(pytree, SparseArray | RaggedArray):
        return tf.type_spec_from_value(to_tensor(pytree))
    leaf = pytree if hasattr(pytree, "shape") else tf.convert_to_tensor(pytree)
    return _Leaf(tuple(leaf.shape), leaf.dtype)


def _structure(shapes: Any) -> Hashable:
    """Return a key that is equal for all pytrees of one structure."""
    if isinstance(shapes, _Leaf | tf.TypeSpec):
        return _Leaf(None, None)
    return tuple(map(_structure, shapes)) if isinstance(shapes, tuple) else shapes
