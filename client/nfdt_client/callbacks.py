"""Keras' callbacks of a captured ``fit``: their requirements, and the validation in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras import callbacks as keras_callbacks
from keras import tree

from nfdt.model.keras_internals import data as keras_data
from nfdt_client.captured import Capture
from nfdt_client.fit_record import FitRecord
from nfdt_client.hook_code import has_own_hook
from nfdt_client.mirror import Validation, finalize

_TEST_HOOKS = ("on_test_begin", "on_test_batch_begin", "on_test_batch_end", "on_test_end")
# Keras' own callbacks that neither read the weights nor change them.
_BLIND = ("ProgbarLogger", "History", "CSVLogger", "TerminateOnNaN", "RemoteMonitor")
_SCHEDULERS = ("LearningRateScheduler", "ReduceLROnPlateau")


def each(callbacks: Any) -> list[Any]:
    """Return the callbacks passed to ``fit`` as a flat list."""
    if hasattr(callbacks, "callbacks") and hasattr(callbacks, "on_train_begin"):
        return list(callbacks.callbacks)
    return [callback for callback in tree.flatten(callbacks or []) if callback is not None]


def watches_tests(callbacks: Any) -> bool:
    """Whether a callback hooks into evaluation; the model is then evaluated in this process."""
    return any(type(c).__name__ == "SwapEMAWeights" or has_own_hook(c, _TEST_HOOKS) for c in each(callbacks))


def watches_weights(callbacks: Any, *, rates_are_state: bool = False) -> bool:
    """Whether a callback may read or change the model between epochs.

    Args:
        callbacks: The callbacks.
        rates_are_state: Whether learning rates are a part of the state, as of optimizers that step on workers.
    """
    blind = _BLIND if rates_are_state else (*_BLIND, *_SCHEDULERS)
    for callback in each(callbacks):
        kind = type(callback)
        own = kind.__module__.startswith("keras.")
        if own and kind.__name__ in blind:
            continue
        if own and kind.__name__ == "EarlyStopping" and not callback.restore_best_weights:
            continue
        return True
    return False


def schedulers(callbacks: Any) -> list[str]:
    """Return the names of Keras' callbacks that set the learning rate of the model's optimizer."""
    return [type(callback).__name__ for callback in each(callbacks) if type(callback).__name__ in _SCHEDULERS]


def callback_list(
    model: Any, arguments: Mapping[str, Any], *, epochs: int, steps: int | None, history: bool = True
) -> Any:
    """Return the CallbackList that Keras' own method makes of its arguments."""
    callbacks, verbose = arguments["callbacks"], arguments["verbose"]
    if isinstance(callbacks, keras_callbacks.CallbackList):
        return callbacks
    return keras_callbacks.CallbackList(
        callbacks,
        add_history=history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def finish_without_epochs(captured: Capture, listeners: Any) -> Any:
    """Finish a fit without epochs as Keras does: no training, no logs."""
    if captured.epochs > 0 and captured.model.optimizer is not None and captured.model.optimizer.built:
        finalize(captured.model)
    listeners.on_train_end(None)
    captured.model.history.nfdt = FitRecord({}, where="nowhere", reason="no epoch is left to train")
    return captured.model.history


def local_validation(captured: Capture, callbacks: Any) -> Validation | None:
    """Return Keras' own evaluation in this process, for data that only this process can read; else None."""
    if captured.local_validation is None:
        return None
    model, arguments = captured.model, captured.arguments
    x, y, sample_weight = captured.local_validation
    batch_size = arguments["validation_batch_size"] or arguments["batch_size"]
    iterators: list[Any] = []

    def validate(epoch: int) -> dict[str, Any] | None:
        if not keras_data.is_due(model, epoch, arguments["validation_freq"]):
            return None
        if not iterators:  # one for all epochs, as in Keras: a generator continues where it stopped
            iterators.append(
                keras_data.evaluation_iterator(
                    x=x,
                    y=y,
                    sample_weight=sample_weight,
                    batch_size=batch_size,
                    distribute_strategy=model.distribute_strategy,
                    steps_per_execution=model.steps_per_execution,
                    steps_per_epoch=arguments["validation_steps"],
                    shuffle=False,
                )
            )
        logs: dict[str, Any] = keras_data.evaluate_with(
            model,
            iterators[0],
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=arguments["validation_steps"],
            callbacks=callbacks,
        )
        return logs

    return validate
