"""Analyzes a dataset's graph: whether workers can run it on parts of its rows, and what must change for that.

The graph is a chain (with ``zip``: a tree) from its sources to its output. Operations that need the whole sequence
refuse. ``shuffle``, ``take`` and ``skip`` of rows, and ``cache``, are removed: the order of the rows has their effect,
and every worker takes other rows in every epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

INFINITE = -1


class Unshippable(Exception):
    """The reason why workers cannot run a dataset, as a part of a sentence."""


@dataclass(frozen=True)
class Flow:
    """Elements at one place of the graph.

    Attributes:
        sources: Names of the source nodes.
        first: First row in use.
        rows: Rows in use.
        unit: Rows of one element.
        aligned: Whether element i consists of the rows ``[i * unit, (i + 1) * unit)`` of each pass.
        elementwise: Whether the operations so far keep or drop single elements, so that a shuffle may precede them.
        expanded: Whether a row becomes a sequence of elements, as a file becomes records.
        count: Number of elements; None: unknown; :data:`INFINITE`.
        repeated: Whether the rows are read several times.
        shuffle: Rows that the order keeps together; 0: not shuffled.
        reshuffle: Whether every pass has an order of its own.
        seed: Seed of the order; 0: none given.
    """

    sources: tuple[str, ...]
    first: int
    rows: int
    unit: int = 1
    aligned: bool = True
    elementwise: bool = True
    expanded: bool = False
    count: int | None = None
    repeated: bool = False
    shuffle: int = 0
    reshuffle: bool = True
    seed: int = 0


_MAPS = {"MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2", "PrefetchDataset", "OptionsDataset"}
_FILTERS = {"FilterDataset", "ParallelFilterDataset"}
_CACHES = {"CacheDataset", "CacheDatasetV2"}
_SHUFFLES = {"ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3"}
_BATCHES = {"BatchDataset": None, "BatchDatasetV2": 2, "ParallelBatchDataset": 3, "PaddedBatchDatasetV2": -1}
_EXPANSIONS = {
    "FlatMapDataset",
    "InterleaveDataset",
    "ParallelInterleaveDatasetV2",
    "ParallelInterleaveDatasetV3",
    "ParallelInterleaveDatasetV4",
}
_REGROUPINGS = {"UnbatchDataset", "GroupByWindowDataset", "RebatchDatasetV2", "DenseToRaggedBatchDataset"}
_PYTHON = {"PyFunc": "numpy_function or py_function", "PyFuncStateless": "numpy_function", "EagerPyFunc": "py_function"}
_PYTHON["GeneratorDataset"] = "from_generator"
_KNOWN = {*_MAPS, *_FILTERS, *_CACHES, *_SHUFFLES, *_BATCHES, *_EXPANSIONS, *_REGROUPINGS}
_KNOWN |= {"RepeatDataset", "TakeDataset", "SkipDataset"}
NAMES = {
    "TensorDataset": "from_tensors",
    "ConcatenateDataset": "concatenate",
    "ShardDataset": "shard",
    "WindowDataset": "window",
    "ScanDataset": "scan",
    "TakeWhileDataset": "take_while",
    "RandomDataset": "random",
    "RandomDatasetV2": "random",
    "DirectedInterleaveDataset": "sample_from_datasets or choose_from_datasets",
    "GeneratorDataset": "from_generator",
    "UniqueDataset": "unique",
    "SaveDatasetV2": "save",
    "LoadDataset": "load",
    "SnapshotDatasetV2": "snapshot",
    "DataServiceDatasetV4": "distribute of tf.data's service",
    "SparseTensorSliceDataset": "from_tensor_slices of sparse tensors",
}


class GraphFlow:
    """Analyzes one graph, and rewires it for workers.

    Args:
        nodes: Nodes of the graph by name; :meth:`of` rewires them.
        workers: Number of workers, which share the buffer of a shuffle that stays.
    """

    def __init__(self, nodes: dict[str, Any], workers: int) -> None:
        self._nodes, self._workers = nodes, workers

    def of(self, name: str) -> tuple[str, Flow]:
        """Return the node that takes the place of ``name``, and the flow of its elements.

        Raises:
            Unshippable: Workers cannot run the graph on parts of its rows.
        """
        node = self._nodes[name]
        operation = node.op
        if operation in ("TensorSliceDataset", "RangeDataset"):
            rows = self._rows(node)
            return name, Flow((name,), 0, rows, count=rows)
        if operation == "ZipDataset":
            return name, self._zipped(node)
        if operation not in _KNOWN:
            raise Unshippable(f"{NAMES.get(operation, operation)} needs the whole sequence of elements")
        below, flow = self.of(_plain(node.input[0]))
        node.input[0] = below
        if operation in _CACHES:  # a worker gets other rows in each epoch: what it kept would be of no use
            return below, flow
        if operation in _SHUFFLES:
            return self._shuffled(node, below, flow)
        if operation in ("TakeDataset", "SkipDataset"):
            return below, self._cut(node, flow)
        return name, self._after(node, flow)

    def _after(self, node: Any, flow: Flow) -> Flow:
        operation = node.op
        if operation in _MAPS:
            return flow
        if operation in _FILTERS:
            return replace(flow, aligned=False, count=None)
        if operation in _BATCHES:
            return self._batched(node, flow)
        if operation == "RepeatDataset":
            times = self.constant(node, 1)
            count = INFINITE if times < 0 else flow.count if flow.count in (None, INFINITE) else times * int(flow.count)
            return replace(flow, count=count, repeated=flow.repeated or times != 1)
        expanded = flow.expanded or operation in _EXPANSIONS
        return replace(flow, aligned=False, elementwise=False, expanded=expanded, count=None)

    def _batched(self, node: Any, flow: Flow) -> Flow:
        size, place = self.constant(node, 1), _BATCHES[node.op]
        drops = place is not None and bool(self.constant(node, place))
        count = flow.count
        if count not in (None, INFINITE):
            # Rows of the next pass may follow a short batch on one worker and not on another.
            exact = flow.aligned and not (flow.repeated and int(count) % size)
            count = (int(count) // size if drops else -(-int(count) // size)) if exact else None
        return replace(flow, unit=flow.unit if flow.expanded else flow.unit * size, count=count)

    def _shuffled(self, node: Any, below: str, flow: Flow) -> tuple[str, Flow]:
        # A shuffle of single elements has its effect in the order of the rows. Any other one stays in the graph, with a
        # buffer that is a worker's part of the script's.
        if not flow.elementwise or flow.repeated:
            self._set_constant(node, 1, max(1, -(-self.constant(node, 1) // self._workers)))
            return node.name, replace(flow, aligned=False, elementwise=False)
        seed = abs(self.constant(node, 2) * 1_000_003 + self.constant(node, 3)) % 2**62 if len(node.input) > 3 else 0
        again = "reshuffle_each_iteration" not in node.attr or node.attr["reshuffle_each_iteration"].b
        unit = min(flow.shuffle or flow.unit, flow.unit)
        return below, replace(flow, shuffle=unit, reshuffle=again, seed=seed or flow.seed)

    def _cut(self, node: Any, flow: Flow) -> Flow:
        what = "take" if node.op == "TakeDataset" else "skip"
        if not flow.aligned or flow.shuffle or flow.repeated:
            raise Unshippable(
                f"{what} after a shuffle, filter, repeat or a change of the elements needs the whole order"
            )
        taken = self.constant(node, 1)  # below 0: all elements
        rows = flow.rows if taken < 0 else min(taken * flow.unit, flow.rows)
        count = flow.count if flow.count is None or taken < 0 else min(taken, flow.count)
        cut = replace(flow, rows=rows, count=count)
        if what == "skip":
            left = None if flow.count is None or count is None else flow.count - count
            cut = replace(flow, first=flow.first + rows, rows=flow.rows - rows, count=left)
        if cut.rows < 1:
            raise Unshippable(f"{what} leaves no element")
        return cut

    def _zipped(self, node: Any) -> Flow:
        flows = []
        for index, given in enumerate(node.input):
            node.input[index], flow = self.of(_plain(given))
            flows.append(flow)
        one = flows[0]
        sources = tuple(source for flow in flows for source in flow.sources)
        rows_of_one = one.first, one.unit, one.shuffle
        if not all(
            flow.aligned
            and flow.elementwise
            and not flow.repeated
            and (flow.first, flow.unit, flow.shuffle) == rows_of_one
            for flow in flows
        ):
            raise Unshippable(
                "zip of datasets that take, filter, batch or shuffle differently needs the whole sequence"
            )
        if len(set(sources)) < len(sources):
            raise Unshippable("a dataset that is used twice needs the whole sequence")
        counts = [flow.count for flow in flows if flow.count is not None]
        shortest = min(flow.rows for flow in flows)
        return replace(one, sources=sources, rows=shortest, count=min(counts) if len(counts) == len(flows) else None)

    def _rows(self, node: Any) -> int:
        if node.op == "RangeDataset":
            start, stop, step = (self.constant(node, place) for place in range(3))
            rows = max(0, -(-(stop - start) // step))
        else:
            dimensions = self.tensor(_plain(node.input[0])).tensor_shape.dim
            rows = int(dimensions[0].size) if len(dimensions) else 0
        if rows < 1:
            raise Unshippable("it has no element")
        return rows

    def tensor(self, name: str) -> Any:
        """Return the tensor of a constant, through Identity nodes.

        Raises:
            Unshippable: It is no constant.
        """
        node = self._nodes[name]
        while node.op == "Identity":
            node = self._nodes[_plain(node.input[0])]
        if node.op != "Const":
            raise Unshippable(f"{node.op} is computed outside the dataset")
        return node.attr["value"].tensor

    def constant(self, node: Any, place: int) -> int:
        """Return an input of a node that is a number.

        Raises:
            Unshippable: It is no constant.
        """
        return int(tf.make_ndarray(self.tensor(_plain(node.input[place]))))

    def _set_constant(self, node: Any, place: int, value: int) -> None:
        given = self.tensor(_plain(node.input[place]))
        given.CopyFrom(tf.make_tensor_proto(value, given.dtype, []))


def _plain(name: str) -> str:
    return name.removeprefix("^").partition(":")[0]


def reachable(nodes: Mapping[str, Any], output: str, without: frozenset[str] = frozenset()) -> set[str]:
    """Return the names of the nodes that ``output`` needs; those in ``without`` need nothing."""
    found, todo = set[str](), [output]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            if name not in without:
                todo += map(_plain, nodes[name].input)
    return found


def check_functions(functions: Any, nodes: Mapping[str, Any]) -> None:
    """Check that the graph needs nothing of this process.

    Raises:
        Unshippable: It calls Python.
    """
    places = [*nodes.values(), *(node for function in functions for node in function.node_def)]
    for node in places:
        if node.op in _PYTHON:
            raise Unshippable(f"{_PYTHON[node.op]} runs Python code of this process")
