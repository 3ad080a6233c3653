"""Sources of batches in a process that trains: arrays, or a dataset that is read here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.row_selection import RowSelection
from nfdt.core.errors import UnreadableData
from nfdt.core.program.shipped_data import load_source
from nfdt.core.specs.job import DataSpec, JobSpec
from nfdt.core.training import data
from nfdt.core.training.dataset_graph import DatasetGraph
from nfdt.core.training.dataset_run import Take
from nfdt.core.training.graph_source import GraphSource
from nfdt.core.training.indexed import ChangeableSource, IndexedSource


class BatchSource(Protocol):
    """Batches by the rows of the coordinator's plan.

    Attributes:
        whole: Whether a row is a whole batch; otherwise it is a sample.
    """

    whole: bool

    def batch(self, rows: RowSelection) -> Any:
        """Return the pytree of these rows."""
        ...

    def prefetch(self, rows: Sequence[RowSelection]) -> None:
        """Prepare the batches of these rows, which will be needed in this order; forget all others."""
        ...

    def begin_epoch(self, epoch: int, first: int) -> None:
        """Begin an epoch; epochs count from ``first``."""
        ...

    def end_epoch(self) -> None:
        """End the epoch that has begun, if it has not ended."""
        ...


@dataclass(frozen=True)
class RowTaker:
    """Access of this process to the rows of a dataset.

    Attributes:
        number: Number of this process in the job.
        take: Takes rows.
        stopped: Set when the job is over for this process.
    """

    number: int
    take: Take
    stopped: threading.Event


def open_source(
    spec: DataSpec | None,
    job: JobSpec,
    read: Callable[[str], bytes],
    open_array: Callable[[str], Array],
    open_rows: Callable[[str], Array | data.RowArray],
    rows: RowTaker | None = None,
) -> BatchSource | None:
    """Open a source; None without data, or where a client feeds them.

    Args:
        spec: The source.
        job: Its job.
        read: Returns an artifact's bytes by its sha256.
        open_array: Returns an artifact that is a ``.npy`` file as an array.
        open_rows: The same for an array of which only some rows are needed.
        rows: Access of this process to the rows of a dataset; None: it cannot run datasets.

    Raises:
        UnreadableData: the data cannot be read on this machine.
    """
    if spec is None or spec.where == "client":
        return None
    if spec.sized:
        return data.ArraySource(spec.structure, [open_rows(name) for name in spec.arrays])
    if not job.code:
        raise UnreadableData("the dataset is code, and the job's specification says that it carries none")
    if spec.rows is not None:
        if rows is None:
            raise UnreadableData("this kind of worker cannot run a dataset")
        graph = DatasetGraph.from_bytes(read(spec.code or ""))
        arrays = [open_array(name) for name in spec.arrays]
        made = GraphSource(graph, arrays, job.fit.seed, rows.number, rows.take, rows.stopped)
        made.check()
        return made
    dataset, class_weight = load_source(read(spec.code or ""), spec.arrays, open_array)
    source = IndexedSource(dataset, class_weight, spec.planned or 0, job.fit.seed)
    source.check()
    return source


def changeable(
    spec: DataSpec | None,
    source: BatchSource | None,
    read: Callable[[str], bytes],
    open_array: Callable[[str], Array],
) -> ChangeableSource:
    """Return the variable through which the script changes an opened source."""

    def load(code: bytes) -> Any:
        assert spec is not None
        return load_source(code or read(spec.code or ""), spec.arrays, open_array)

    return ChangeableSource(source if isinstance(source, IndexedSource) else None, load)
