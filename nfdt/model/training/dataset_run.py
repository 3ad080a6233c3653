"""Executes the graph of a dataset on the rows that this process takes."""

from __future__ import annotations

import functools
import operator
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import UnreadableData
from nfdt.core.order import sample_order
from nfdt.model.training.dataset_graph import DatasetGraph, DatasetHeader, SourceHeader, read_element

Take = Callable[[int, int, int], tuple[int, int] | None]
"""Takes rows for this process, given an iteration, a pass, and how many it has taken; returns [begin, end) or None."""


_PASSES = 2**32  # more than an iteration has, so that no two passes have the same number


def order_of_pass(header: DatasetHeader, seed: int, iteration: int, pass_index: int) -> Array:
    """Return the rows of a pass of an iteration in their order; a last block that is short stays the last."""
    rows = np.arange(header.first, header.first + header.rows, dtype=np.int64)
    if not header.shuffle:
        return rows
    number = iteration * _PASSES + pass_index if header.reshuffle else 0
    block = header.shuffle
    whole = header.rows // block
    order = sample_order(whole, True, header.seed or seed, number)
    return np.concatenate([rows[: whole * block].reshape(whole, block)[order].reshape(-1), rows[whole * block :]])


def check_files(header: DatasetHeader) -> None:
    """Check that this machine has the files that the client's machine has.

    Raises:
        UnreadableData: A file is missing or has another size.
    """
    for file in header.files:
        try:
            size: int | None = os.path.getsize(file.path)
        except OSError:
            size = None
        if size != file.size:
            what = "no such file" if size is None else f"a file of {size} bytes"
            raise UnreadableData(
                f"{file.path}, which the dataset reads: expected a file of {file.size} bytes on every worker's "
                f"machine. Received: {what} on {socket.gethostname()}. Copy the file there, or use data='client'"
            )


class _Splits:
    """The splits that this worker takes in one iteration, equal for all sources of the graph."""

    def __init__(self, take: Take, iteration: int) -> None:
        self._take, self.iteration = take, iteration
        self._lock = threading.Lock()
        self._taken: dict[int, list[tuple[int, int] | None]] = {}

    def get(self, pass_index: int, number: int) -> tuple[int, int] | None:
        """Return split ``number`` of a pass; None after the last."""
        with self._lock:
            taken = self._taken.setdefault(pass_index, [])
            while len(taken) <= number and (not taken or taken[-1] is not None):
                taken.append(self._take(self.iteration, pass_index, len(taken)))
            return taken[number] if number < len(taken) else None


class DatasetRun:
    """The graph of a dataset and the arrays of its sources.

    Args:
        graph: The graph.
        arrays: Arrays of the sources, usually memory-mapped.
        seed: Seed of the job.
        number: Number of this process in the job; random states of Keras' layers differ by it.
        take: Takes rows for this worker, see :data:`Take`.
    """

    def __init__(self, graph: DatasetGraph, arrays: Sequence[Array], seed: int, number: int, take: Take) -> None:
        self._header, self._arrays, self._seed, self._take = graph.header, arrays, seed, take
        self._graph = tf.compat.v1.GraphDef.FromString(graph.graph)
        _seed_apart(self._graph, number)
        _name_variables(self._graph, secrets.token_hex(8))
        self._element = read_element(graph.header.element)

    def iterate(self, iteration: int) -> Iterator[Any]:
        """Begin an iteration; return an iterator over its batches, pytrees of tensors."""
        header = self._header
        splits = _Splits(self._take, iteration)
        sources = [self._source(source, splits) for source in header.sources]

        def run(*variants: Any) -> Any:
            names = [f"{source.node}:0" for source in header.sources]
            (output,) = tf.graph_util.import_graph_def(
                self._graph, dict(zip(names, variants, strict=True)), [f"{header.output}:0"], name=""
            )
            return output

        given = [tf.data.experimental.to_variant(source) for source in sources]
        if header.output in [source.node for source in header.sources]:
            return iter(tf.data.experimental.from_variant(given[0], self._element))
        function = tf.compat.v1.wrap_function(run, [tf.TensorSpec(variant.shape, variant.dtype) for variant in given])
        dataset = tf.data.experimental.from_variant(function(*given), self._element)
        _keep_variables(self._graph)
        return iter(dataset)

    def _source(self, source: SourceHeader, splits: _Splits) -> Any:
        """Return a dataset with the source's elements for the rows that this worker takes."""
        components = self._components(source)
        passes = iter(range(2**62))

        def chunks() -> Iterator[tuple[Array, ...]]:
            pass_index, number = next(passes), 0
            order = order_of_pass(self._header, self._seed, splits.iteration, pass_index)
            while (split := splits.get(pass_index, number)) is not None:
                rows = order[slice(*split)]
                yield tuple(component(rows) for component in components)
                number += 1

        one = np.zeros(1, np.int64)
        specs = [component(one + self._header.first) for component in components]
        signature = tuple(tf.TensorSpec((None, *spec.shape[1:]), tf.as_dtype(spec.dtype)) for spec in specs)
        # Rows come from the coordinator, which gives each row of an iteration to one worker (decision 32).
        chunked = tf.data.Dataset.from_generator(chunks, output_signature=signature)
        return chunked.flat_map(lambda *parts: tf.data.Dataset.from_tensor_slices(parts))

    def _components(self, source: SourceHeader) -> list[Callable[[Array], Any]]:
        if source.range is not None:
            start, step, dtype = source.range
            return [lambda rows: (start + rows * step).astype(tf.as_dtype(dtype).as_numpy_dtype)]
        found: list[Callable[[Array], Any]] = []
        for place, node in zip(source.arrays, source.texts, strict=True):
            array = self._text(node) if place < 0 else self._arrays[place]
            found.append(functools.partial(operator.getitem, array))
        return found

    def _text(self, name: str) -> Any:
        nodes = {node.name: node for node in self._graph.node}
        node = nodes[name]
        while node.op == "Identity":
            node = nodes[node.input[0].partition(":")[0]]
        return tf.io.parse_tensor(node.attr["value"].tensor.SerializeToString(), tf.string).numpy()


def _seed_apart(graph: Any, number: int) -> None:
    """Make the initial states of Keras' seed generators, pairs of integers, differ between processes."""
    types = {dtype.as_datatype_enum: dtype for dtype in (tf.int64, tf.uint32)}
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        if node.op == "AssignVariableOp" and (given := nodes.get(node.input[1])) is not None and given.op == "Const":
            tensor = given.attr["value"].tensor
            dtype = types.get(tensor.dtype)
            if dtype is not None and [size.size for size in tensor.tensor_shape.dim] == [2]:
                state = tf.make_ndarray(tensor) + np.array([number, 0], dtype.as_numpy_dtype)
                tensor.CopyFrom(tf.make_tensor_proto(state, dtype))


def _name_variables(graph: Any, prefix: str) -> None:
    """Give variables names by which all iterations of this run, and no other run, find them."""
    for node in graph.node:
        if node.op == "VarHandleOp":
            node.attr["shared_name"].s = f"{prefix}/{node.name}".encode()


def _keep_variables(graph: Any) -> None:
    """Remove the initial values of variables, so that the next iteration continues with the values of the last."""
    assigned = {f"^{node.name}" for node in graph.node if node.op == "AssignVariableOp"}
    for node in graph.node:
        kept = [name for name in node.input if name not in assigned]
        del node.input[:]
        node.input.extend(kept)
