"""Captures a ``fit`` call: its arguments and its data, checked and read as Keras does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras

from nfdt.core.errors import CaptureError, UsageError
from nfdt.core.host.keras_backend import current_backend, ignored_backend
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals import models as keras_models
from nfdt.model.program.compiling import overrides
from nfdt.model.program.untrained import carrying_layers
from nfdt_client import callbacks, placement, training_data
from nfdt_client.options import Options
from nfdt_client.placement import Choice, PlacementTerms
from nfdt_client.training_data import Arrays, GraphData, Indexed, Stream, TrainingData
from nfdt_client.upload import Blob

logger = logging.getLogger(__name__)


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


def capture(
    model: Any, arguments: dict[str, Any], options: Options, allows_code: Callable[[], bool] = lambda: True
) -> Capture:
    """Check a call of ``fit`` and read its data.

    Args:
        model: The user's model.
        arguments: Arguments of ``fit`` by name.
        options: Options of the session.
        allows_code: Whether the server takes code; called only for data that are code.

    Raises:
        UsageError: bad arguments, empty data, lengths that differ.
        CaptureError: a backend on which the algorithm does not train, a model with a ``make_train_function`` of its
            own, or data that cannot be shipped.
    """
    options.require_backend()
    _warn_of_ignored_backend()
    keras_models.require_compiled(model)
    strategy = keras_models.distribution_strategy(model)
    if strategy is not None and not (keras_models.is_mirrored(strategy) and options.algorithm.topology_facts.flat):
        raise CaptureError(
            "Expected a model made outside tf.distribute, or for workers that are no ranks under MirroredStrategy. "
            f"Received: one made under {strategy!r} for algorithm={options.algorithm.name!r}. Remove the strategy's "
            "scope: the workers take its place."
        )
    _refuse_own_loop(model)
    arguments = {**arguments, "epochs": _limited_epochs(arguments["epochs"])}
    if arguments["epochs"] < 0 or arguments["initial_epoch"] < 0:
        raise UsageError(f"epochs: expected 0 or more. Received: {arguments['epochs']}, {arguments['initial_epoch']}.")
    x, y, sample_weight, validation_data = _split(arguments)
    train = training_data.read(
        x,
        y,
        sample_weight,
        batch_size=arguments["batch_size"],
        steps_per_epoch=arguments["steps_per_epoch"],
        steps_per_execution=int(model.steps_per_execution or 1),
        shuffle=arguments["shuffle"],
        class_weight=arguments["class_weight"],
    )
    arguments["steps_per_epoch"] = keras_models.limited_steps(arguments["steps_per_epoch"])
    terms = PlacementTerms(
        options.data,
        allows_code,
        options.cluster.workers,
        arguments["steps_per_epoch"],
        _why_no_datasets(options, model),
        arguments["callbacks"],
    )
    choice = placement.choose(train, x, arguments["class_weight"], terms)
    captured = Capture(model, arguments, choice)
    return captured if validation_data is None else _with_validation(captured, validation_data, terms)


def _refuse_own_loop(model: Any) -> None:
    """Raise CaptureError if the user replaces the function that trains on the batches of an iterator."""
    if replaces(model, "make_train_function"):
        raise CaptureError(
            "Expected Keras' own make_train_function(). Received: one of "
            f"{type(model).__name__}, which would not be called: the workers call train_step() with each batch. Move "
            "what it does with a batch to train_step(), and what it does between batches to a callback; "
            "gradient_accumulation_steps of the optimizer accumulates gradients."
        )


def replaces(model: Any, method: str) -> bool:
    """Whether the user's class, or the model itself, has another method than ``keras.Model``."""
    return overrides(model, method) or method in vars(model)


def _warn_of_ignored_backend() -> None:
    if name := ignored_backend():
        logger.warning(
            "KERAS_BACKEND=%s has no effect, because it was set after Keras had been imported: the model trains on "
            "%s. Set it before the script is started, or remove it from the script.",
            name,
            current_backend().name,
        )


def _limited_epochs(epochs: int) -> int:

    limit = keras_models.epoch_limit()
    return min(int(epochs), limit) if limit else int(epochs)


def _split(arguments: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:

    data = (arguments["x"], arguments["y"], arguments["sample_weight"])
    validation_data = arguments["validation_data"]
    if arguments["validation_split"] and validation_data is None:
        training_data.check_not_empty(*data)
        try:
            data, validation_data = keras_data.split_off_validation(data, arguments["validation_split"])
        except ValueError as error:
            raise UsageError(str(error)) from error
    return (*data, validation_data)


def _why_no_datasets(options: Options, model: Any) -> str:
    """Return why workers of this job cannot run datasets, or ""."""
    name = options.algorithm.name
    if carrying_layers(model):
        return "layers with stateful=True expect the batches in the order of the script"
    if options.batch_hooks == "exact":
        return "batch_hooks='exact' expects the batches in the order of the script"
    if not options.algorithm.topology_facts.flat:
        return f"algorithm={name!r} trains on ranks, which take their batches in rounds"
    if options.algorithm.consistency_facts.synchronous:
        return f"algorithm={name!r} is synchronous: every worker needs a batch in every round"
    return ""


def _with_validation(captured: Capture, validation_data: Any, terms: PlacementTerms) -> Capture:

    arguments = captured.arguments
    x, y, sample_weight = keras_data.unpack_batch(validation_data)
    captured.validation_data = (x, y, sample_weight)
    if callbacks.watches_tests(arguments["callbacks"]) or replaces(captured.model, "make_test_function"):
        return captured
    steps = arguments["validation_steps"]
    batches = keras_models.limited_batches(steps, int(captured.model.steps_per_execution or 1))
    if isinstance(x, keras.utils.PyDataset):
        if isinstance(captured.train, Stream):  # this process takes part anyway
            return captured
        data = placement.choose(training_data.read(x, steps_per_epoch=steps), x, None, terms).data
        captured.validation = (data.head(batches) if batches else data) if isinstance(data, Indexed) else None
        return captured
    if not training_data.is_arrays((x, y, sample_weight)):
        return captured
    batch_size = arguments["validation_batch_size"] or arguments["batch_size"]
    data = training_data.read(x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps)
    if isinstance(data, Arrays):
        captured.validation = data.head(batches * data.batch_size) if batches else data
    return captured
