"""Describes Keras' callbacks of a submitted ``fit`` for the worker that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from nfdt.core.errors import UsageError
from nfdt.core.specs.callbacks import CallbackKind, CallbackSpec, CallbacksSpec
from nfdt.model.keras_internals import training as keras_training
from nfdt.model.program.code import digest_sources, dump_objects
from nfdt.model.training.epoch_callbacks import SCHEDULE, dump_callbacks
from nfdt_client.callbacks import each
from nfdt_client.capture import ShippedCallbacks
from nfdt_client.upload import Blob

KINDS: tuple[str, ...] = get_args(CallbackKind)

_REMEDIES = {
    **dict.fromkeys(
        ("ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint"),
        "The server stores the state of every epoch: handle.result() has the weights, EarlyStopping restores the best "
        "ones, and `nfdt jobs resume` goes on with a job that failed.",
    ),
    **dict.fromkeys(
        ("CSVLogger", "History", "ProgbarLogger", "RemoteMonitor", "TensorBoard"),
        "The server stores the logs of every epoch: handle.events(), and handle.result().history.",
    ),
}
_OTHERS = "nfdt.distribute runs every callback, in the script."


def check_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks of a submitted ``fit`` as a list.

    Raises:
        UsageError: one of them needs the script's process, or writes files.
    """
    found = each(callbacks)
    for callback in found:
        kind = type(callback)
        own = kind.__module__.startswith("keras.")
        if own and kind.__name__ in KINDS and not _replaced(callback):
            continue
        raise UsageError(
            f"submit: expected callbacks that run without this script: {', '.join(KINDS)} of keras.callbacks, with the "
            f"methods that they have. Received: {kind.__name__}{_replaced(callback)}. "
            f"{_REMEDIES.get(kind.__name__, _OTHERS) if own else _OTHERS}"
        )
    return found


def _replaced(callback: Any) -> str:
    names = [name for name, value in vars(callback).items() if callable(value) and hasattr(type(callback), name)]
    return f" with another {names[0]}" if names else ""


def begin_callbacks(callbacks: Sequence[Any], model: Any, epoch: int) -> ShippedCallbacks | None:
    """Call the hooks before the first epoch on the model, and describe the callbacks as they are then.

    Args:
        callbacks: The callbacks, checked.
        model: The compiled model, whose learning rate they may set.
        epoch: The first epoch.

    Returns:
        The callbacks for the job; None: there are none.

    Raises:
        UsageError: one sets the learning rate, which a schedule of the optimizer decides.
        CaptureError: a schedule cannot be pickled.
    """
    if not callbacks:
        return None
    rate = _learning_rate(model)
    for callback in callbacks:
        if rate is None and type(callback).__name__ in ("LearningRateScheduler", "ReduceLROnPlateau"):
            raise UsageError(
                f"submit: {type(callback).__name__} sets the learning rate. Expected: an optimizer with a number as "
                "learning rate. Received: one with a schedule. Remove one of the two."
            )
        callback.set_model(model)
    # The first hooks run here, on the script's model, so that a rate that they set is a part of the program.
    for hook, arguments in (("on_train_begin", ()), ("on_epoch_begin", (epoch,))):
        for callback in callbacks:
            getattr(callback, hook)(*arguments)
    members, blobs = zip(*map(_describe, callbacks), strict=True)
    rate = _learning_rate(model)
    spec = CallbacksSpec(members=members, state=dump_callbacks(callbacks, rate), learning_rate=rate)
    return ShippedCallbacks(spec, tuple(blob for blob in blobs if blob is not None))


def _learning_rate(model: Any) -> float | None:
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return float(inner.learning_rate) if keras_training.has_fixed_learning_rate(inner) else None


def _describe(callback: Any) -> tuple[CallbackSpec, Blob | None]:
    kind = type(callback).__name__
    if kind != "LearningRateScheduler":
        return CallbackSpec(kind=kind), None
    pickled = dump_objects({SCHEDULE: callback.schedule})
    blob = Blob(pickled.data)
    return CallbackSpec(kind=kind, code=blob.sha256, sources=digest_sources(pickled.code)), blob
