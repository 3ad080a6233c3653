"""A ``tf.data.Dataset`` as an artifact that workers run, or the reason why only this process can iterate it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.model.keras_internals.data import dataset_variables
from nfdt.model.program.untrained import SEED_STATE
from nfdt.model.training.dataset_graph import DatasetGraph, DatasetHeader, FileSize, SourceHeader, write_element
from nfdt_client.dataset_flow import INFINITE, Flow, GraphFlow, Unshippable, check_functions, reachable

MAX_GRAPH_BYTES = 64 * 2**20
MAX_DATA_BYTES = 2**30
FILES_PER_WORKER = 4
SPLITS_PER_WORKER = 16
SPLIT_ROWS = 64
_IGNORE_STATE = 1  # random operations draw other numbers on every worker; the rest is checked here
_READERS = ("ReadFile", "TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset", "FixedLengthRecordDatasetV2")
_READERS_PREFIXES = ("FixedLengthRecordDataset", "WholeFileReader", "ExperimentalCSVDataset", "CSVDataset")


@dataclass(frozen=True)
class ShippedDataset:
    """A dataset that workers run.

    Attributes:
        graph: The graph.
        arrays: Arrays of its sources.
        rows: Number of rows that the workers share.
        split: Rows that a worker takes at a time.
        batches: Number of batches of one iteration; None: unknown.
        infinite: Whether an iteration never ends.
    """

    graph: DatasetGraph
    arrays: tuple[Any, ...]
    rows: int
    split: int
    batches: int | None
    infinite: bool


def ship(dataset: Any, workers: int) -> ShippedDataset:
    """Return the dataset as a graph and arrays.

    Args:
        dataset: A ``tf.data.Dataset`` of batches.
        workers: Number of workers that will share it.

    Raises:
        Unshippable: Workers cannot run it.
    """
    try:
        element = write_element(dataset.element_spec)
    except TypeError as error:
        raise Unshippable(f"its elements contain a {error}, and workers take dense tensors") from None
    graph = _serialize(dataset)
    nodes = {node.name: node for node in graph.node}
    end = next(node for node in graph.node if node.op == "_Retval")
    needed = reachable(nodes, end.name)
    check_functions(graph.library.function, {name: nodes[name] for name in needed})
    analysis = GraphFlow(nodes, workers)
    output, flow = analysis.of(end.input[0].partition(":")[0])
    if flow.expanded and flow.rows < FILES_PER_WORKER * workers:
        raise Unshippable(
            f"it has {flow.rows} files or parts for {workers} workers, and at least {FILES_PER_WORKER} for each are "
            "needed to share them evenly"
        )
    sources, arrays, kept = _sources(analysis, nodes, flow)
    header = DatasetHeader(
        output=output,
        element=element,
        sources=sources,
        first=flow.first,
        rows=flow.rows,
        shuffle=flow.shuffle,
        reshuffle=flow.reshuffle,
        seed=flow.seed,
        files=_files(graph, nodes),
    )
    alone = reachable(nodes, output, frozenset(flow.sources)) | kept
    _check_resources(nodes, alone)
    left = tf.compat.v1.GraphDef(library=graph.library, versions=graph.versions)
    for node in graph.node:
        if node.name in alone and node.name not in flow.sources:
            left.node.append(node)
    if (size := left.ByteSize()) > MAX_GRAPH_BYTES:
        raise Unshippable(f"its graph has {size >> 20} MB, and at most {MAX_GRAPH_BYTES >> 20} MB are sent")
    known = flow.count is not None and flow.count != INFINITE
    return ShippedDataset(
        DatasetGraph(header=header, graph=left.SerializeToString()),
        tuple(arrays),
        flow.rows,
        _split(flow, workers),
        flow.count if known else None,
        flow.count == INFINITE,
    )


def variables_of(dataset: Any) -> list[Any]:
    """Return the variables that a dataset reads, except the states of random generators."""
    return [v for v in dataset_variables(dataset) if SEED_STATE not in v.name]


def _split(flow: Flow, workers: int) -> int:
    """Return a number of rows that makes whole batches, few calls, and shares that end at about the same time."""
    if flow.expanded:
        return 1
    most = flow.rows // (SPLITS_PER_WORKER * workers)
    return flow.unit * max(1, min(SPLIT_ROWS, most) // flow.unit)


def _serialize(dataset: Any) -> Any:
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_IGNORE_STATE,
            strip_device_assignment=True,
        )
        return tf.compat.v1.GraphDef.FromString(serialized.numpy())
    except tf.errors.OpError as error:
        raise Unshippable(f"TensorFlow cannot serialize its graph ({error.message.splitlines()[0][:200]})") from None
    except Exception as error:  # of protobuf, whose exceptions depend on its implementation: more than 2 GB
        raise Unshippable(f"its graph cannot be sent ({type(error).__name__})") from None


def _sources(
    analysis: GraphFlow, nodes: dict[str, Any], flow: Flow
) -> tuple[tuple[SourceHeader, ...], list[Any], set[str]]:
    """Return the sources, their arrays, and the nodes of components that stay in the graph."""
    headers, arrays, kept, total = [], list[Any](), set[str](), 0
    for name in flow.sources:
        node = nodes[name]
        if node.op == "RangeDataset":
            start, step = analysis.constant(node, 0), analysis.constant(node, 2)
            dtype = tf.as_dtype(node.attr["output_types"].list.type[0]).name
            headers.append(SourceHeader(node=name, range=(start, step, dtype)))
            continue
        places, texts = [], []
        for given in node.input:
            plain = given.partition(":")[0]
            tensor = analysis.tensor(plain)
            if tensor.dtype == tf.string.as_datatype_enum:
                places.append(-1)
                kept |= reachable(nodes, plain)
            else:
                total += len(tensor.tensor_content)
                if total > MAX_DATA_BYTES:
                    raise Unshippable(
                        f"its arrays have more than {MAX_DATA_BYTES >> 20} MB; give fit the arrays instead"
                    )
                places.append(len(arrays))
                arrays.append(np.asarray(tf.make_ndarray(tensor)))
            texts.append(plain if places[-1] < 0 else "")
        headers.append(SourceHeader(node=name, arrays=tuple(places), texts=tuple(texts)))
    return tuple(headers), arrays, kept


def _check_resources(nodes: dict[str, Any], needed: set[str]) -> None:
    """Check that no handle of this process is in the graph; shuffles make their own on the worker."""
    own = {
        given.partition(":")[0]
        for name in needed
        if nodes[name].op.startswith("Shuffle")
        for given in nodes[name].input
    }
    for name in needed - own:
        node = nodes[name]
        if node.op == "Const" and node.attr["dtype"].type in (
            tf.resource.as_datatype_enum,
            tf.variant.as_datatype_enum,
        ):
            raise Unshippable("it uses a variable or another resource of this process")


def _files(graph: Any, nodes: dict[str, Any]) -> tuple[FileSize, ...]:
    """Return the files that a graph reads, as far as their names are among its constants.

    Workers compare their sizes with those of their own files, so that a missing file is noticed before the training.
    """
    operations = {node.op for node in nodes.values()}
    operations |= {node.op for function in graph.library.function for node in function.node_def}
    if not any(operation in _READERS or operation.startswith(_READERS_PREFIXES) for operation in operations):
        return ()
    names: dict[str, None] = {}
    for node in nodes.values():
        if node.op == "Const" and node.attr["dtype"].type == tf.string.as_datatype_enum:
            tensor = tf.io.parse_tensor(node.attr["value"].tensor.SerializeToString(), tf.string)
            for value in np.ravel(tensor.numpy()):
                if 0 < len(value) < 4096 and b"\0" not in value:
                    names[value.decode("utf-8", "surrogateescape")] = None
    return tuple(FileSize(path=name, size=os.path.getsize(name)) for name in names if os.path.isfile(name))
