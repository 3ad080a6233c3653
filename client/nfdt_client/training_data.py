"""Data of ``fit``, read with Keras' own adapters: whole arrays, a dataset that workers index, or a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from nfdt.core.arrays.pytree import flatten_structure
from nfdt.core.errors import CaptureError, UsageError
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.program.shipped_data import ShippedSource, dump_source
from nfdt.model.program.source_watch import SourceWatch
from nfdt.model.training.host_batches import as_batch, is_composite, leaves, map_arrays, rows_of
from nfdt_client.upload import Blob, array_blob

if TYPE_CHECKING:
    from nfdt_client.dataset_capture import ShippedDataset


@dataclass(frozen=True)
class Arrays:
    """All samples: a pytree of NumPy arrays of ``samples`` rows, in the structure that ``train_step`` sees."""

    pytree: Any
    samples: int
    batch_size: int
    where = "server arrays"

    @property
    def batches(self) -> int:
        """Number of batches of one pass, the last one possibly short."""
        return -(-self.samples // self.batch_size)

    @cached_property
    def blobs(self) -> tuple[str, tuple[Blob, ...]]:
        """Structure of the pytree, and its arrays, hashed as they were when this was first read."""
        structure, arrays = flatten_structure(self.pytree)
        return structure, tuple(map(array_blob, arrays))

    def head(self, rows: int) -> Arrays:
        """Return the first ``rows`` rows."""
        return Arrays(map_arrays(lambda a: a[:rows], self.pytree), min(rows, self.samples), self.batch_size)

    def first(self) -> Any:
        """Return the first batch."""
        return self.head(self.batch_size).pytree


class Stream:
    """Batches that only the client can make; Keras' own epoch iterator yields those of an epoch.

    Args:
        iterator: A Keras ``EpochIterator`` over the user's object.
    """

    where = "client"
    batch_size = 32  # nominal: a streamed batch has any size

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        iterator.reset()

    @property
    def batches(self) -> int | None:
        """Number of batches per epoch; None if unknown."""
        count = self._iterator.num_batches
        return int(count) if count else None

    @property
    def dataset(self) -> Any:
        """The ``tf.data.Dataset`` behind the batches; None for other data."""
        return keras_data.tensorflow_dataset(self._iterator)

    def first(self) -> Any:
        """Return the first batch; the first epoch yields it again, or a new one of a dataset that reads variables."""
        from nfdt_client.dataset_capture import variables_of

        batch = self._iterator.peek()
        if self.dataset is not None and variables_of(self.dataset):
            self._iterator.rewind()
        return as_batch(batch)

    def rewind(self) -> None:
        """Go back to the beginning of the data, after an epoch that was not read to its end.

        Raises:
            CaptureError: the data can be read only once.
        """
        if keras_data.is_read_once(self._iterator):
            raise CaptureError(
                "The server was restarted, and the epoch cannot be fed again: batches of a generator are read only "
                "once. Expected: arrays, a keras.utils.PyDataset or a tf.data.Dataset."
            )
        self._iterator.reset()

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of the next epoch as pytrees of arrays."""
        for _, _, buffer in self._iterator:
            yield from map(as_batch, buffer)


@dataclass(frozen=True)
class Indexed:
    """A PyDataset that goes with the job: workers read its batches by index.

    Attributes:
        stream: The same data, read in this process.
        source: The pair of the dataset and ``class_weight``.
        shipped: This pair, pickled.
        watch: Finds changes of this pair since then.
        whole: Number of batches of the dataset.
        sample: First batch.
        most: Largest number of batches of one pass; None: all.
    """

    stream: Stream
    source: tuple[Any, Any]
    shipped: ShippedSource
    watch: SourceWatch
    whole: int
    sample: Any
    most: int | None = None
    where = "workers"

    @classmethod
    def of(cls, stream: Stream, dataset: Any, class_weight: Any) -> Indexed:
        """Pickle a dataset as it is now.

        Raises:
            UnreadableData: it cannot be pickled.
        """
        source = dataset, class_weight
        whole = int(dataset.num_batches)
        return cls(stream, source, dump_source(source), SourceWatch(source), whole, stream.first())

    def renewed(self) -> Indexed:
        """Return the same data, pickled again if the script has changed them since."""
        if not self.watch.changed():
            return self
        return replace(Indexed.of(self.stream, *self.source), most=self.most)

    @property
    def batches(self) -> int:
        """Number of batches of one pass."""
        return self.whole if self.most is None else min(self.most, self.whole)

    @property
    def batch_size(self) -> int:
        """Number of samples in the first batch; others may have more or fewer."""
        return rows_of(self.sample)

    def head(self, batches: int) -> Indexed:
        """Return the first ``batches`` batches."""
        return replace(self, most=min(batches, self.batches))

    def first(self) -> Any:
        """Return the first batch."""
        return self.sample


@dataclass(frozen=True)
class GraphData:
    """A ``tf.data.Dataset`` that goes with the job: workers run its graph on the rows that they take.

    Attributes:
        stream: The same data, read in this process.
        shipped: The graph and the arrays of its sources.
        batch_size: Number of samples in the first batch; others may have more or fewer.
        variables: Variables that it reads, with the values that they have now.
    """

    stream: Stream
    shipped: ShippedDataset
    batch_size: int
    variables: tuple[Any, ...] = ()
    where = "workers"

    @property
    def batches(self) -> int | None:
        """Number of batches of one iteration; None if unknown."""
        return self.shipped.batches

    def first(self) -> Any:
        """Return the first batch; the first epoch in this process yields it again."""
        return self.stream.first()


TrainingData = Arrays | Indexed | GraphData | Stream


def read(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Arrays | Stream:
    """Read the training data as Keras does.

    Args:
        x: As for ``fit``.
        y: As for ``fit``.
        sample_weight: As for ``fit``.
        **options: ``batch_size``, ``steps_per_epoch``, ``shuffle`` and ``class_weight`` of ``fit``;
            ``steps_per_execution`` of ``compile``.

    Raises:
        UsageError: no data.
        ValueError: Keras' own, of data that its adapters refuse (lengths that differ, unknown types, ...).
    """
    check_not_empty(x, y, sample_weight)
    iterator = keras_data.ReplayingIterator(x, y, sample_weight, **options)
    arrays = keras_data.array_inputs(iterator)
    if arrays is None or is_composite((x, y, sample_weight)):
        return Stream(iterator)
    inputs, samples, batch_size = arrays
    return Arrays(_whole(inputs), samples, batch_size)


def check_not_empty(x: Any, y: Any, sample_weight: Any) -> None:
    """Raise UsageError if there is no sample to train on."""
    if x is None:
        raise UsageError("Training data: expected x. Received: None.")
    for name, part in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        if not isinstance(part, np.ndarray | list | tuple | dict) and not hasattr(part, "shape"):
            continue
        for leaf in leaves(part):
            shape = getattr(leaf, "shape", None)
            if shape is not None and len(shape) and shape[0] == 0:
                raise UsageError(f"Data: expected at least one sample. Received: {name} of shape {tuple(shape)}.")


def own_hook(dataset: Any) -> str:
    """Return the name of a hook of epochs that a PyDataset has of its own, or ""."""
    base = keras.utils.PyDataset
    hooks = ("on_epoch_begin", "on_epoch_end")
    own = [name for name in hooks if getattr(type(dataset), name) is not getattr(base, name) or name in vars(dataset)]
    return own[0] if own else ""


def is_arrays(pytree: Any) -> bool:
    """Whether these are dense arrays that can go with a job."""
    return keras_data.can_be_sliced(pytree) and not is_composite(pytree)


def _whole(inputs: Any) -> Any:
    """Convert the adapter's inputs to NumPy arrays as it converts batches (float64 to floatx, pandas, strings)."""
    return map_arrays(lambda leaf: np.asarray(keras_data.sliced_array(leaf)), inputs)
