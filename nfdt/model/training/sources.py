"""Sources of batches in a process that trains: arrays, a PyDataset by index, or a dataset that is read here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array, RowSelection
from nfdt.core.errors import UnreadableData
from nfdt.core.specs.job import DataSpec, JobSpec
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals.training import seeded_globals
from nfdt.model.program.shipped_data import load_source
from nfdt.model.training import data
from nfdt.model.training.dataset_graph import DatasetGraph
from nfdt.model.training.dataset_run import check_files
from nfdt.model.training.graph_source import GraphSource, RowTaker
from nfdt.model.training.host_batches import as_batch


class IndexedSource(data.BatchSource):
    """Batches of a PyDataset; a row of the plan is the index of a batch.

    Args:
        dataset: The user's dataset.
        class_weight: As for ``fit``.
        batches: Number of batches of one pass.
        seed: Seed of the random generators inside the epoch hooks, which run alike in all copies of the dataset.
    """

    whole = True

    def __init__(self, dataset: Any, class_weight: Any, batches: int, seed: int) -> None:
        self._batches, self._seed = batches, seed
        self._use(dataset, class_weight)
        self._ahead = max(1, int(dataset.max_queue_size))
        # Threads, also for ``use_multiprocessing``: a process that has started TensorFlow cannot be forked safely.
        self._pool = ThreadPoolExecutor(max(1, int(dataset.workers)), thread_name_prefix="dataset")
        self._reading: dict[int, Future[Any]] = {}
        self._wanted: deque[int] = deque()
        self._next_epoch: int | None = None
        self._open = False

    def _use(self, dataset: Any, class_weight: Any) -> None:
        self._dataset = dataset
        self._standardize = keras_data.batch_standardizer(dataset, class_weight)

    def replace(self, dataset: Any, class_weight: Any) -> None:
        """Read from another dataset from now on; discard what was read ahead."""
        self._stop()
        self._use(dataset, class_weight)

    def check(self) -> None:
        """Read the first batch.

        Raises:
            UnreadableData: it cannot be read on this machine, or the dataset has fewer batches here.
        """
        try:
            batches = int(self._dataset.num_batches)
            self._read(0)
        except Exception as error:  # any exception of the user's code
            raise UnreadableData(
                f"the first batch of {type(self._dataset).__name__} cannot be read on a worker "
                f"({type(error).__name__}: {error})"
            ) from error
        if batches < self._batches:
            raise UnreadableData(
                f"{type(self._dataset).__name__} has {batches} batches on a worker and {self._batches} in the script"
            )

    def batch(self, rows: RowSelection) -> Any:
        """Return the batch of one index as a pytree of arrays; the user's own exception if it cannot be read."""
        index = _index(rows)
        future = self._reading.pop(index, None)
        if future is None:
            if index in self._wanted:
                self._wanted.remove(index)
            return self._read(index)
        self._fill()
        return future.result()

    def prefetch(self, rows: Sequence[RowSelection]) -> None:
        """Read these batches in the background, in this order, at most ``max_queue_size`` ahead; discard all others."""
        wanted = [_index(r) for r in rows]
        for index in self._reading.keys() - set(wanted):
            self._reading.pop(index).cancel()
        self._wanted = deque(index for index in wanted if index not in self._reading)
        self._fill()

    def begin_epoch(self, epoch: int, first: int) -> None:
        """Call the dataset's hooks up to the begin of this epoch, each once; epochs count from ``first``.

        A copy that was loaded later catches up, so that all copies have made the same changes.
        """
        begun = first if self._next_epoch is None else self._next_epoch
        for number in range(begun, epoch + 1):
            self.end_epoch()
            self._stop()
            self._hook(self._dataset.on_epoch_begin, number, 0)
            self._next_epoch, self._open = number + 1, True

    def end_epoch(self) -> None:
        """Call the dataset's hook at the end of an epoch, unless it has been called."""
        if self._open:
            self._stop()
            self._hook(self._dataset.on_epoch_end, (self._next_epoch or 1) - 1, 1)
            self._open = False

    def _hook(self, hook: Callable[[], Any], epoch: int, place: int) -> None:
        """Call a hook with generators that are seeded alike in all copies of the dataset."""
        # Many datasets shuffle their samples in a hook; copies that differ would lose samples (decision 30).
        seed = np.random.SeedSequence((self._seed, epoch, place)).generate_state(1)[0]
        with seeded_globals(int(seed)):
            hook()

    def _stop(self) -> None:
        """Discard all batches, and wait until no thread reads."""
        self._wanted.clear()
        pending, self._reading = self._reading, {}
        wait([future for future in pending.values() if not future.cancel()])

    def _fill(self) -> None:
        while self._wanted and len(self._reading) < self._ahead:
            index = self._wanted.popleft()
            self._reading[index] = self._pool.submit(self._read, index)

    def _read(self, index: int) -> Any:
        return as_batch(self._standardize(self._dataset[index]))


class ChangeableSource:
    """A dataset in the form of a variable, whose assignments are changes that the script has made.

    The value is the pickle of the dataset and ``class_weight`` as bytes, shape ``(n,)`` uint8; n = 0: those of the job.

    Args:
        source: The source; None: this job reads no such data.
        load: Returns dataset and ``class_weight`` of such a pickle.
    """

    def __init__(self, source: IndexedSource | None, load: Callable[[bytes], tuple[Any, Any]]) -> None:
        self._source, self._load = source, load
        self._value = np.zeros(0, np.uint8)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self._value.shape

    def numpy(self) -> Array:
        """Return the value."""
        return self._value

    def assign(self, value: Array) -> None:
        """Replace the dataset, unless the value is the same.

        Raises:
            UnreadableData: it cannot be loaded on this machine.
        """
        if not np.array_equal(value, self._value):
            if self._source is not None:
                self._source.replace(*self._load(value.tobytes()))
            self._value = np.array(value)


def _index(rows: RowSelection) -> int:
    return int(rows.start if isinstance(rows, slice) else rows[0])


def open_source(
    spec: DataSpec | None,
    job: JobSpec,
    read: Callable[[str], bytes | memoryview],
    open_array: Callable[[str], Array],
    open_rows: Callable[[str], Array | data.RowArray],
    rows: RowTaker | None = None,
) -> data.BatchSource | None:
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
        check_files(graph.header)
        return GraphSource(graph, [open_array(name) for name in spec.arrays], job.fit.seed, rows)
    dataset, class_weight = load_source(read(spec.code or ""), spec.arrays, open_array)
    source = IndexedSource(dataset, class_weight, spec.planned or 0, job.fit.seed)
    source.check()
    return source


def changeable(
    spec: DataSpec | None,
    source: data.BatchSource | None,
    read: Callable[[str], bytes | memoryview],
    open_array: Callable[[str], Array],
) -> ChangeableSource:
    """Return the variable through which the script changes an opened source."""

    def load(code: bytes) -> Any:
        assert spec is not None
        return load_source(code or read(spec.code or ""), spec.arrays, open_array)

    return ChangeableSource(source if isinstance(source, IndexedSource) else None, load)
