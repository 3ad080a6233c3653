"""Arguments and data of a ``fit`` call, interpreted as Keras does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.errors import CaptureError, UsageError
from nfdt.core.host.keras_backend import current_backend, ignored_backend
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals import models as keras_models
from nfdt.model.program.compiling import overrides
from nfdt.model.program.untrained import carrying_layers
from nfdt_client import callbacks, placement, training_data
from nfdt_client.captured import Capture
from nfdt_client.options import Options
from nfdt_client.placement import PlacementTerms
from nfdt_client.training_data import Arrays, Indexed, Stream

logger = logging.getLogger(__name__)


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
    if (strategy := keras_models.distribution_strategy(model)) is not None:
        raise CaptureError(
            f"Expected a model made outside tf.distribute. Received: one made under {strategy!r}. "
            "Remove the strategy's scope: the workers take its place."
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


def check_batch(model: Any, batch: Any) -> None:
    """Run one batch through a built model symbolically, so that wrong shapes are reported before anything is sent.

    Done only for Functional and Sequential models with Keras' own ``train_step``, and for data that are not ragged.
    For others the symbolic run could fail although the real one does not.

    Raises:
        UsageError: model, loss and data do not fit together.
    """
    known = isinstance(model, keras_models.Functional | keras.Sequential) and type(model).__module__.startswith(
        "keras."
    )
    if not known or not model.built or any(isinstance(leaf, RaggedArray) for leaf in training_data.leaves(batch)):
        return

    def symbolic(leaf: Any) -> Any:
        dtype = "string" if leaf.dtype.kind in "OSU" else keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor(leaf.shape, dtype, sparse=isinstance(leaf, SparseArray))

    try:
        x, y, sample_weight = keras_data.unpack_batch(training_data.map_arrays(symbolic, batch))
        keras_models.loss_spec(model, x, y, sample_weight)
    except ValueError as error:
        raise UsageError(f"The training data do not fit the model: {error}") from error
    except Exception as error:  # the symbolic run is optional: the workers do the real one
        logger.debug("The shapes could not be checked beforehand: %s", error)
