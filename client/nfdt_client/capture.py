"""Arguments and data of a ``fit`` call, interpreted as Keras does."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nfdt.core.errors import CaptureError, UsageError
from nfdt_client import callbacks, training_data
from nfdt_client.captured import Capture
from nfdt_client.options import Options
from nfdt_client.training_data import Arrays

logger = logging.getLogger(__name__)


def bind(fit: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a ``fit`` call by name; wrong ones raise Python's own TypeError."""
    bound = inspect.signature(fit).bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    arguments.pop("self", None)
    return arguments


def capture(model: Any, arguments: dict[str, Any], options: Options) -> Capture:
    """Check a call of ``fit`` and read its data.

    Raises:
        UsageError: bad arguments, empty data, lengths that differ.
        CaptureError: another backend than TensorFlow, or data that cannot be shipped.
    """
    import keras

    from nfdt.core import keras_internals

    if keras.backend.backend() != "tensorflow":
        raise CaptureError(f"Expected Keras on TensorFlow. Received: KERAS_BACKEND={keras.backend.backend()!r}.")
    keras_internals.require_compiled(model)
    if (strategy := keras_internals.distribution_strategy(model)) is not None:
        raise CaptureError(
            f"Expected a model made outside tf.distribute. Received: one made under {strategy!r}. "
            "Remove the strategy's scope: the workers take its place."
        )
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
        shuffle=arguments["shuffle"],
        class_weight=arguments["class_weight"],
    )
    if isinstance(train, Arrays):
        arguments["steps_per_epoch"] = _limited_steps(arguments["steps_per_epoch"], train, options)
    captured = Capture(model, arguments, train)
    return captured if validation_data is None else _with_validation(captured, validation_data)


def _limited_epochs(epochs: int) -> int:
    from nfdt.core import keras_internals

    limit = keras_internals.epoch_limit()
    return min(int(epochs), limit) if limit else int(epochs)


def _split(arguments: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    from nfdt.core import keras_internals

    data = (arguments["x"], arguments["y"], arguments["sample_weight"])
    validation_data = arguments["validation_data"]
    if arguments["validation_split"] and validation_data is None:
        training_data.check_not_empty(*data)
        try:
            data, validation_data = keras_internals.split_off_validation(data, arguments["validation_split"])
        except ValueError as error:
            raise UsageError(str(error)) from error
    return (*data, validation_data)


def _limited_steps(steps: int | None, train: Arrays, options: Options) -> int | None:
    """Limit the steps to one pass over the arrays, with Keras' own warning."""
    workers = options.cluster.workers if options.algorithm.consistency_facts.synchronous else 1
    available = -(-train.samples // (train.batch_size * workers))
    if steps is None or steps < available:
        return steps
    if steps > available:
        warnings.warn(
            f"Your input ran out of data: steps_per_epoch={steps}, but the arrays have {available} batches. "
            "Each epoch is one pass over them.",
            stacklevel=2,
        )
    return None


def _with_validation(captured: Capture, validation_data: Any) -> Capture:
    from nfdt.core import keras_internals

    arguments = captured.arguments
    x, y, sample_weight = keras_internals.unpack_batch(validation_data)
    captured.validation_data = (x, y, sample_weight)
    if not training_data.is_arrays((x, y, sample_weight)) or callbacks.watches_tests(arguments["callbacks"]):
        return captured
    steps = arguments["validation_steps"]
    batch_size = arguments["validation_batch_size"] or arguments["batch_size"]
    data = training_data.read(x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps)
    if isinstance(data, Arrays):
        captured.validation = data.head(steps * data.batch_size) if steps else data
    return captured


def check_batch(model: Any, batch: Any) -> None:
    """Run one batch through a built model symbolically, so that wrong shapes are reported before anything is sent.

    Done only for Functional and Sequential models with Keras' own ``train_step``.
    For others the symbolic run could fail although the real one does not.

    Raises:
        UsageError: model, loss and data do not fit together.
    """
    import keras

    from nfdt.core import keras_internals

    known = isinstance(model, keras_internals.Functional | keras.Sequential) and type(model).__module__.startswith(
        "keras."
    )
    if not known or not model.built:
        return

    def symbolic(leaf: Any) -> Any:
        dtype = "string" if leaf.dtype.kind in "OSU" else keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor(leaf.shape, dtype)

    try:
        x, y, sample_weight = keras_internals.unpack_batch(training_data.map_arrays(symbolic, batch))
        prediction = keras_internals.output_spec(model, x)
        keras_internals.loss_spec(model, x, y, prediction, sample_weight)
    except ValueError as error:
        raise UsageError(f"The training data do not fit the model: {error}") from error
    except Exception as error:  # the symbolic run is optional: the workers do the real one
        logger.debug("The shapes could not be checked beforehand: %s", error)
