"""Embedding layers whose table is on the shards: a step has the rows of its batch only, which are requested before it.

The numbers of the rows follow from the batch. They are computed by the part of the step's own graph that leads to the
lookups, which must not depend on anything but the batch: no variable, no random number, no Python function.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from nfdt.core.arrays.table_rows import RowIndex, Rows, RowVector, Vector
from nfdt.core.errors import CaptureError
from nfdt.model.backends.direct_call import DirectCall, Graph, Prepared
from nfdt.model.backends.embedding import LOOKUPS
from nfdt.model.keras_internals.models import flatten_layers

_STATELESS = ("LookupTableFindV2",)  # of StringLookup and IntegerLookup, whose tables do not change
_OF_A_LOOKUP = ("ResourceGather", "VariableShape")  # the latter is of its gradient


class LookedUpTable:
    """Embedding layer that looks up rows in those of a batch, in place of its whole table.

    Args:
        layer: A built ``keras.layers.Embedding``.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self.variable = layer, layer.embeddings
        self.name = str(layer.name)
        self.rows, self.width = (int(n) for n in self.variable.shape)
        self._numbers = tf.Variable(np.zeros(0, np.int64), shape=[None], trainable=False)
        self._held: RowIndex = np.zeros(0, np.int32)
        self._recorded: list[Any] | None = None
        self._operations: set[str] = set()

    def call(self, inputs: Any) -> Any:
        """Do what ``Embedding.call`` does."""
        inputs = keras.ops.convert_to_tensor(inputs)
        ids = tf.cast(inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32), tf.int64)
        ids = tf.where(ids < 0, ids + self.rows, ids)
        if self._recorded is None:
            found = tf.gather(self.variable.value, self._places(ids))
        else:
            self._recorded.append(ids)
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            found = tf.gather(self.variable.value, tf.zeros_like(ids))
            self._operations.update(operation.name for operation in graph.get_operations()[before:])
        return tf.cast(found, self._layer.compute_dtype)

    def _places(self, ids: Any) -> Any:
        """Return the places of rows; -1, with which the lookup fails, for a row that was not requested."""
        flat = tf.reshape(ids, [-1])
        places = tf.searchsorted(self._numbers, flat, out_type=tf.int64)
        last = tf.size(self._numbers, out_type=tf.int64) - 1
        known = tf.gather(self._numbers, tf.minimum(places, last)) == flat
        return tf.ensure_shape(tf.reshape(tf.where(known, places, -1), tf.shape(ids)), ids.shape)

    def check(self, numbers: RowIndex) -> RowIndex:
        """Return ascending row numbers, or raise the error of TensorFlow for one that the table does not have."""
        for number in (*numbers[:1], *numbers[-1:]):
            if not 0 <= number < self.rows:
                raise tf.errors.InvalidArgumentError(
                    None, None, f"Layer {self.name!r}: indices = {number} is not in [0, {self.rows})"
                )
        return numbers

    def hold(self, rows: Rows, *, padded: bool) -> None:
        """Replace the rows; ``padded`` to a power of two, so that XLA compiles for few numbers of them."""
        numbers, values = rows.index.astype(np.int64), rows.values
        self._held = rows.index
        if padded:
            missing = (1 << max(0, numbers.size - 1).bit_length()) - numbers.size
            numbers = np.concatenate([numbers, np.full(missing, np.iinfo(np.int64).max)])
            values = np.concatenate([values, np.zeros((missing, self.width), np.float32)])
        variable = self.variable.value
        _assign(self._numbers, tf.constant(numbers))
        _assign(variable, tf.cast(tf.constant(values), variable.dtype))

    def summed(self, places: npt.NDArray[Any], values: Vector) -> Rows:
        """Return the gradient of the table, of some places in the rows; those of a row are added up."""
        return Rows.summed(self._held[places], values)

    @contextmanager
    def recording(self) -> Iterator[list[Any]]:
        """Record the tensors of row numbers that lookups in the block ask for."""
        found: list[Any] = []
        self._recorded = found
        self._operations.clear()
        with _replaced_call(self._layer, self.call):
            try:
                yield found
            finally:
                self._recorded = None

    def is_read_elsewhere(self, graph: Any) -> bool:
        """Return whether a graph reads the table in another way than by recorded lookups."""
        handle = self.variable.value.handle
        uses = [use for outer, inner in graph.captures if outer is handle for use in inner.consumers()]
        return any(use.type not in _OF_A_LOOKUP for use in uses) or any(
            use.type == "ResourceGather" and use.name not in self._operations for use in uses
        )


class LookedUpTables:
    """The tables of a model that are on the shards, in the order of its trainable variables.

    Args:
        tables: Each table; its layer's ``call`` is that of the table.
        padded: Whether the step is compiled by XLA.
    """

    def __init__(self, tables: Sequence[LookedUpTable], *, padded: bool) -> None:
        self.tables, self._padded = tables, padded

    @classmethod
    def of(cls, model: Any) -> LookedUpTables | None:
        """Return the tables of a model that has rows in their place; None if it has none."""
        held = [
            table
            for layer in flatten_layers(model)
            if isinstance(table := getattr(vars(layer).get("call"), "__self__", None), LookedUpTable)
        ]
        places = {id(v): place for place, v in enumerate(model.trainable_variables)}
        held.sort(key=lambda table: places[id(table.variable)])
        return cls(held, padded=bool(model.jit_compile)) if held else None

    def assign(self, weights: RowVector) -> Vector:
        """Take over the rows of a batch, and return the other weights."""
        for table, rows in zip(self.tables, weights.rows, strict=True):
            table.hold(rows, padded=self._padded)
        return weights.dense

    def numbers_of(self, step: Callable[[Any], object]) -> NumbersOfBatch:
        """Return what a step of the model looks up, a function of a pytree of tensors."""
        return NumbersOfBatch(self, step)

    def gradient(self, vector: Any, index: Sequence[Any]) -> RowVector:
        """Build a step's gradient from the recorded ``vector``, with the tables' rows at its end, and their places."""
        flat = np.asarray(vector)
        at = flat.size - sum(int(p.shape[0]) * table.width for table, p in zip(self.tables, index, strict=True))
        dense, rows = flat[:at], []
        for table, places in zip(self.tables, index, strict=True):
            count = int(places.shape[0])
            values = flat[at : at + count * table.width].reshape(count, table.width)
            rows.append(table.summed(np.asarray(places), values))
            at += values.size
        return RowVector(dense, tuple(rows))


class NumbersOfBatch:
    """Row numbers that a step of a model looks up for a batch, as a function of the batch.

    Args:
        tables: The tables.
        step: Runs the step on a batch, a pytree of tensors.
    """

    def __init__(self, tables: LookedUpTables, step: Callable[[Any], object]) -> None:
        self._tables, self._step = tables.tables, step
        self._graphs: dict[Hashable, Graph] = {}

    def __call__(self, batch: Any) -> list[RowIndex]:
        """Return the numbers of each table, ascending, without repetition.

        Raises:
            CaptureError: they depend on more than the batch.
            InvalidArgumentError: a table has no such row.
        """
        prepared = batch if isinstance(batch, Prepared) else DirectCall.prepare(batch)
        found = self._graph(prepared)(prepared.components)
        return [
            table.check(np.unique(np.asarray(ids)).astype(np.int64)).astype(np.int32)
            for table, ids in zip(self._tables, found, strict=True)
        ]

    def _graph(self, batch: Prepared) -> Graph:
        """Return the graph for batches like this one, of any number of samples if the model can be traced for that."""
        shapes: list[list[tuple[Any, ...]]] = [
            [(None, *tensor.shape[1:]) if tensor.shape.rank else () for tensor in batch.components],
            [tuple(tensor.shape) for tensor in batch.components],
        ]
        for shape in shapes:
            if (known := self._graphs.get(repr(shape))) is not None:
                return known
        try:
            found = shapes[0], self._trace(batch, shapes[0])
        except CaptureError:
            raise
        except Exception:  # a model for batches of one size
            found = shapes[1], self._trace(batch, shapes[1])
        self._graphs[repr(found[0])] = found[1]
        return found[1]

    def _trace(self, batch: Prepared, shapes: Sequence[tuple[Any, ...]]) -> Graph:
        with ExitStack() as stack:
            recorded = [stack.enter_context(table.recording()) for table in self._tables]
            whole = _traced(self._step, batch, shapes)
        for table, ids in zip(self._tables, recorded, strict=True):
            if reason := why_not_ahead(ids, whole.graph):
                raise CaptureError(
                    f"Layer {table.name!r}: expected row numbers that follow from the batch, to look them up on the "
                    f"shards. Received: some that depend on {reason}. Set worker_tables_mb above the size of the "
                    "tables."
                )
        with whole.graph.as_default():
            flat = [tf.concat([tf.zeros(0, tf.int64), *(tf.reshape(i, [-1]) for i in ids)], 0) for ids in recorded]
        return Graph(whole.prune(whole.inputs[: len(batch.components)], flat))


def looked_up_ahead(
    model: Any, tables: Sequence[int], steps: Iterable[Callable[[Any], object]], batch: Any
) -> list[int]:
    """Return those of the tables, by index, that could be on the shards.

    Their row numbers follow from the batch in each of the steps, and no step reads them in another way than by lookups.

    Args:
        model: A built model, whose optimizer changes nothing meanwhile.
        tables: Trainable variables, by index, that are tables of embeddings.
        steps: Steps of the model, called with a pytree of tensors.
        batch: A batch of arrays.
    """
    prepared = DirectCall.prepare(batch)
    shapes = [tuple(tensor.shape) for tensor in prepared.components]
    layers = {index: layer_of(model, index) for index in tables}
    held = {index: LookedUpTable(layer) for index, layer in layers.items() if layer is not None}
    ahead = set(held)
    for step in steps:
        with ExitStack() as stack:
            recorded = {index: stack.enter_context(table.recording()) for index, table in held.items()}
            graph = _traced(step, prepared, shapes).graph
        ahead -= {i for i, ids in recorded.items() if why_not_ahead(ids, graph) or held[i].is_read_elsewhere(graph)}
    return sorted(ahead)


def why_not_ahead(recorded: Iterable[Any], graph: Any) -> str | None:
    """Return on what row numbers of lookups in a graph depend besides its inputs; None if on nothing else."""
    seen: set[str] = set()
    waiting = []
    for ids in recorded:
        if ids.graph is not graph:
            return "an inner graph, as that of a loop or of a decorated function"
        waiting.append(ids.op)
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.op_def.is_stateful and operation.type not in _STATELESS:
            return f"an operation of type {operation.type}"
        waiting += [tensor.op for tensor in operation.inputs]
    return None


def layer_of(model: Any, index: int) -> Any:
    """Return the embedding of Keras or NFDT whose table is the trainable variable with an index; None for others."""
    variable = model.trainable_variables[index]
    layers = (layer for layer in flatten_layers(model) if type(layer) in LOOKUPS and layer.built)
    return next((layer for layer in layers if layer.embeddings is variable), None)


def use_rows(model: Any, tables: Sequence[int]) -> LookedUpTables:
    """Let the embeddings of these trainable variables look up rows in those of a batch, from now on."""
    for index in tables:
        layer = layer_of(model, index)
        vars(layer)["call"] = LookedUpTable(layer).call
    found = LookedUpTables.of(model)
    assert found is not None
    return found


def _traced(step: Callable[[Any], object], batch: Prepared, shapes: Sequence[tuple[Any, ...]]) -> Any:
    """Return the graph of a step, which is never run as a whole, as a function of the components of a batch."""

    def run(*components: Any) -> None:
        tensors = iter(tf.nest.pack_sequence_as(batch.tensors, components, expand_composites=True))
        step(tf.nest.map_structure(lambda leaf: None if leaf is None else next(tensors), batch.pytree))

    specs = [tf.TensorSpec(shape, tensor.dtype) for shape, tensor in zip(shapes, batch.components, strict=True)]
    return tf.compat.v1.wrap_function(tf.autograph.experimental.do_not_convert(run), specs)


def _assign(variable: Any, value: Any) -> None:
    """Assign eagerly, without the checks of ``assign``, which take longer than the copy of a few rows."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


@contextmanager
def _replaced_call(layer: Any, call: Callable[..., Any]) -> Iterator[None]:
    held = vars(layer).get("call")
    vars(layer)["call"] = call
    try:
        yield
    finally:
        del vars(layer)["call"]
        if held is not None:
            vars(layer)["call"] = held
