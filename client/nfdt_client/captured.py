"""One ``fit`` call: its checked arguments and its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt_client.options import Options
from nfdt_client.placement import Choice
from nfdt_client.training_data import Arrays, GraphData, Indexed, Stream, TrainingData
from nfdt_client.upload import Blob


@dataclass(frozen=True)
class ShippedCallbacks:
    """Callbacks that go with a detached job, and the pickled schedules that they name."""

    spec: CallbacksSpec
    blobs: tuple[Blob, ...]


@dataclass
class Capture:
    """One ``fit`` call: its arguments checked, its data read, nothing sent yet.

    Attributes:
        model: The user's model.
        arguments: Arguments of ``fit`` by name, defaults filled in.
        choice: Training data, and where they are read.
        validation: Validation data that go with the job; None when there are none or Keras evaluates here.
        validation_data: Validation data passed to ``fit``, as (x, y, sample_weight).
        callbacks: Callbacks that go with a detached job.
    """

    model: Any
    arguments: dict[str, Any]
    choice: Choice
    validation: Arrays | Indexed | None = None
    validation_data: tuple[Any, Any, Any] | None = None
    callbacks: ShippedCallbacks | None = None

    @property
    def train(self) -> TrainingData:
        """Training data."""
        return self.choice.data

    @property
    def ships_code(self) -> bool:
        """Whether data or callbacks go with the job as code."""
        if self.callbacks is not None and self.callbacks.spec.code:
            return True
        return isinstance(self.train, Indexed | GraphData) or isinstance(self.validation, Indexed)

    def read_here(self, reason: str) -> None:
        """Read in this process what was to go with the job as code."""
        if isinstance(self.train, Indexed | GraphData):
            self.choice = Choice(self.train.stream, reason)
        if isinstance(self.validation, Indexed):
            self.validation = None

    def hash_arrays(self) -> None:
        """Hash the arrays as they are now: Keras reads them before callbacks begin, which may write to them."""
        for data in (self.train, self.validation):
            if isinstance(data, Arrays):
                _ = data.blobs

    def renew(self) -> None:
        """Pickle data that go with the job as code again where callbacks have changed them."""
        if isinstance(self.train, Indexed):
            self.choice = replace(self.choice, data=self.train.renewed())
        if isinstance(self.validation, Indexed):
            self.validation = self.validation.renewed()

    @property
    def changeable(self) -> dict[str, Indexed]:
        """Data that go with the job as code and that callbacks may change, by the job's name for them."""
        named = {"train": self.train, "validation": self.validation}
        return {name: data for name, data in named.items() if isinstance(data, Indexed)}

    @property
    def fixed(self) -> tuple[Any, ...]:
        """Variables of the data that go with the job as constants."""
        return self.train.variables if isinstance(self.train, GraphData) else ()

    @property
    def local_validation(self) -> tuple[Any, Any, Any] | None:
        """Validation data that Keras evaluates in this process."""
        return self.validation_data if self.validation is None else None

    @property
    def epochs(self) -> int:
        """Index after the last epoch."""
        return int(self.arguments["epochs"])

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps per epoch that ``fit`` asks for, as in Keras a multiple of ``steps_per_execution``.

        None for one pass over the data, and for streams, whose epochs end by themselves.
        """
        steps, size = self.arguments["steps_per_epoch"], int(self.model.steps_per_execution or 1)
        return -(-int(steps) // size) * size if steps and not isinstance(self.train, Stream) else None

    def steps_of_job(self, options: Options) -> int | None:
        """Return the steps per epoch of the job; None where each epoch is a whole pass."""
        steps, batches = self.steps_per_epoch, self.train.batches
        if isinstance(self.train, Arrays | Indexed) and steps and batches and steps >= -(-batches // _parts(options)):
            return None
        return steps

    def steps(self, options: Options) -> int | None:
        """Return the steps per epoch to display until the cluster reports the actual number."""
        batches = self.train.batches and -(-self.train.batches // _parts(options))
        return batches if isinstance(self.train, Stream) else self.arguments["steps_per_epoch"] or batches

    @property
    def local_steps(self) -> int | None:
        """Steps per epoch of Keras' own fit in this process; None: unknown."""
        return int(self.arguments["steps_per_epoch"] or 0) or self.train.batches


def _parts(options: Options) -> int:
    """Return the number of batches in a step."""
    return options.cluster.workers if options.algorithm.consistency_facts.synchronous else 1
