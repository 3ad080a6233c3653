"""Decides where the data of a fit are read, and says why: the server's arrays, the workers, or this process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from nfdt.core.errors import UnreadableData
from nfdt.model.program.source_watch import reaches
from nfdt.model.program.step_effects import changes_of_script
from nfdt.model.training.host_batches import rows_of
from nfdt_client.training_data import GraphData, Indexed, Stream, TrainingData, own_hook

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """Data of a fit in the form in which they are read.

    Attributes:
        data: The data.
        reason: Why they are read there.
    """

    data: TrainingData
    reason: str

    @property
    def where(self) -> str:
        """``server arrays``, ``workers`` or ``client``."""
        return self.data.where


@dataclass(frozen=True)
class PlacementTerms:
    """Terms on which data may go to the workers.

    Attributes:
        mode: The option ``data``.
        allows_code: Whether the server takes code; called only for data that are code.
        workers: Number of workers.
        steps_per_epoch: As for ``fit``.
        why_no_datasets: Why workers of this job cannot run datasets; "" if they can.
        callbacks: Callbacks of the fit, which may change the data.
    """

    mode: str = "auto"
    allows_code: Callable[[], bool] = lambda: True
    workers: int = 1
    steps_per_epoch: int | None = None
    why_no_datasets: str = ""
    callbacks: Any = None


def choose(read: TrainingData, x: Any, class_weight: Any, terms: PlacementTerms) -> Choice:
    """Decide where the job reads data that Keras' adapters have read here.

    Args:
        read: Arrays, or a stream.
        x: The object that the script passed.
        class_weight: As for ``fit``.
        terms: What may go to the workers.

    Raises:
        UnreadableData: ``data="workers"``, and only this process can read the data.
    """
    if not isinstance(read, Stream):
        return Choice(read, "arrays are uploaded once")
    if terms.mode == "client":
        return Choice(read, "data='client'")
    try:
        if isinstance(x, keras.utils.PyDataset):
            indexed = _indexed(read, x, class_weight, terms)
            return Choice(indexed, "a PyDataset is code whose batches workers read by index")
        if read.dataset is not None:
            return Choice(_graph(read, terms), "a tf.data.Dataset is a graph that workers run, each on other rows")
        raise UnreadableData(f"a {type(x).__name__} can be iterated only in the script's process")
    except UnreadableData as error:
        if terms.mode == "workers":
            raise refused(str(error)) from error
        if read.dataset is not None:
            logger.warning("The data are read in this process, not on the workers: %s.", error)
        return Choice(read, str(error))


def refused(reason: str) -> UnreadableData:
    """Return the error for ``data="workers"`` where workers cannot read the data."""
    return UnreadableData(
        "data='workers': expected data that the workers can read: arrays, a keras.utils.PyDataset that can be pickled, "
        "or a tf.data.Dataset without Python code, whose files exist on every worker. Received: "
        f"{reason.rstrip('.')}. Correct that, or use data='auto' or data='client', which read the data in this process."
    )


def _graph(stream: Stream, terms: PlacementTerms) -> GraphData:
    from nfdt_client.dataset_capture import Unshippable, ship, variables_of  # imports TensorFlow

    what = "the tf.data.Dataset cannot run on the workers, because"
    if terms.why_no_datasets:
        raise UnreadableData(f"{what} {terms.why_no_datasets}")
    if not terms.allows_code():
        raise UnreadableData(f"{what} its graph is code, and the server takes none (it runs without --allow-code)")
    try:
        shipped = ship(stream.dataset, terms.workers)
        if shipped.infinite and not terms.steps_per_epoch:
            raise Unshippable("it repeats without end, and fit has no steps_per_epoch")
    except Unshippable as error:
        raise UnreadableData(f"{what} {error}") from None
    # The graph has variables as constants, so a callback that sets one would change nothing on the workers.
    variables = variables_of(stream.dataset)
    if variables and reaches(terms.callbacks, variables):
        raise UnreadableData(f"{what} it reads a variable that a callback may change ({variables[0].name})")
    return GraphData(stream, shipped, rows_of(stream.first()), tuple(variables))


def _indexed(stream: Stream, dataset: Any, class_weight: Any, terms: PlacementTerms) -> Indexed:
    name, hook = type(dataset).__name__, own_hook(dataset)
    if not dataset.num_batches:
        raise UnreadableData(f"{name} does not say how many batches it has (__len__ or num_batches)")
    if not terms.allows_code():
        raise UnreadableData(f"{name} is code, and the server takes none (it was started without --allow-code)")
    # Its hooks change the copies on the workers, and a callback the one here: no pickle could have both changes.
    if hook and reaches(terms.callbacks, [dataset]):
        raise UnreadableData(f"{name} is changed by its {hook}() and may be by a callback, which refers to it")
    if changed := changes_of_script(type(dataset).__getitem__, stream.first):
        raise UnreadableData(f"__getitem__() of {name} changes variables of the script: {', '.join(changed)}")
    return Indexed.of(stream, dataset, class_weight)
