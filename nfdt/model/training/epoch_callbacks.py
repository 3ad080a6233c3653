"""Keras' own callbacks of a detached job, called at the end of an epoch on a worker.

Callbacks are created for each call: their attributes are part of the job's state, so that any worker can continue.
They see a model without weights. Its weights are represented by the number of the epoch that has ended, which a
callback stores, and gives back in order to restore them; the server has the weights of that epoch.
"""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from nfdt.core.errors import ProtocolError
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.work.instructions import CallbackDecision

_DIRECTIONS = {"less": keras.ops.less, "greater": keras.ops.greater}
_OF_THE_FIT = ("params", "validation_data")
_MOST, _LONGEST = 20, 1000  # messages of an epoch, and characters of one
SCHEDULE = "job>schedule"  # name of the only object in a schedule's pickle


class _Optimizer:
    """Optimizer as callbacks see it: a learning rate, in float32."""

    def __init__(self, learning_rate: float) -> None:
        self._rate = np.float32(learning_rate)

    @property
    def learning_rate(self) -> np.float32:
        """The learning rate."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._rate = np.float32(value)


class _EpochModel:
    """Model as callbacks see it between two epochs; see the docstring of the module."""

    def __init__(self, epoch: int, learning_rate: float | None, metrics: Sequence[Any]) -> None:
        self.stop_training = False
        self.metrics = metrics
        self.optimizer = None if learning_rate is None else _Optimizer(learning_rate)
        self.restored: int | None = None
        self._epoch = epoch

    def get_weights(self) -> int:
        """Return the number that represents the weights."""
        return self._epoch

    def set_weights(self, weights: int) -> None:
        """Restore the weights of an epoch."""
        self.restored = weights


def dump_callbacks(callbacks: Iterable[Any], learning_rate: float | None) -> str:
    """Return the attributes of callbacks, and the learning rate, as JSON.

    Args:
        callbacks: Objects of the classes that a ``CallbackKind`` names, whose training has begun.
        learning_rate: Rate of the optimizer; None if a schedule of the optimizer decides it.
    """
    members = [{"direction": _direction(one), "attributes": _attributes(one)} for one in callbacks]
    return json.dumps({"learning_rate": learning_rate, "members": members})


def _attributes(callback: Any) -> dict[str, Any]:
    found = {}
    for name, value in vars(callback).items():
        number = value.item() if isinstance(value, np.generic) else value
        if not name.startswith("_") and name not in _OF_THE_FIT and isinstance(number, bool | int | float | str | None):
            found[name] = number
    return found


def _direction(callback: Any) -> str | None:
    operation = getattr(callback, "monitor_op", None)
    return next((name for name, one in _DIRECTIONS.items() if one is operation), None)


@dataclass(frozen=True)
class EpochEnd:
    """End of an epoch.

    Attributes:
        epoch: Its number.
        steps: Number of its steps.
        is_last: Whether it is the last one of the fit.
        logs: Its logs as in Keras, those of the validation with ``val_``.
    """

    epoch: int
    steps: int
    is_last: bool
    logs: Mapping[str, Any]


class EpochCallbacks:
    """Callbacks of one job.

    Args:
        spec: The callbacks.
        load: Returns a schedule by its artifact.
        metrics: Metrics of the model, from which callbacks learn whether more is better.
    """

    def __init__(self, spec: CallbacksSpec, load: Callable[[str], Any], metrics: Sequence[Any]) -> None:
        self._metrics = metrics
        self._makers = [
            (getattr(keras.callbacks, member.kind), (load(member.code),) if member.code else ())
            for member in spec.members
        ]

    def decide(self, state: str, end: EpochEnd) -> tuple[CallbackDecision, dict[str, Any]]:
        """Call the hooks from the end of an epoch to the beginning of the next one, or to that of the training's end.

        Args:
            state: Attributes of the callbacks; see :func:`dump_callbacks`.
            end: The end of the epoch.

        Returns:
            The decision, and the logs with what callbacks added.

        Raises:
            ProtocolError: the state does not belong to these callbacks.
            RuntimeError: the loss is not finite, and TerminateOnNaN shall raise an error.
        """
        try:
            found = json.loads(state)
            rate, members = found["learning_rate"], list(found["members"])
            callbacks = [self._revived(*pair) for pair in zip(self._makers, members, strict=True)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"State of callbacks: expected that of this job's callbacks. Received: {state[:200]!r}."
            ) from error
        model, logs = _EpochModel(end.epoch, rate, self._metrics), dict(end.logs)
        for callback in callbacks:
            callback.set_model(model)
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()) as printed:
            warnings.simplefilter("always")
            _call_hooks(callbacks, model, end, logs)
        shown = (str(one.message) for one in warned if issubclass(one.category, UserWarning))
        messages = [*shown, *printed.getvalue().splitlines()]
        rate = None if model.optimizer is None else float(model.optimizer.learning_rate)
        kept = {one.best_weights for one in callbacks if getattr(one, "best_weights", None) is not None}
        decision = CallbackDecision(
            state=dump_callbacks(callbacks, rate),
            learning_rate=rate,
            stop=model.stop_training,
            kept=tuple(sorted(kept)),
            restored=model.restored,
            messages=tuple(text[:_LONGEST] for text in messages if text)[:_MOST],
        )
        return decision, logs

    def _revived(self, maker: tuple[Any, tuple[Any, ...]], state: Mapping[str, Any]) -> Any:
        cls, arguments = maker
        callback = cls(*arguments)
        callback.on_train_begin()  # creates further attributes
        known = vars(callback)
        known.update({name: value for name, value in state["attributes"].items() if name in known})
        if state["direction"] is not None:
            callback.monitor_op = _DIRECTIONS[state["direction"]]
        return callback


def _call_hooks(callbacks: Sequence[Any], model: _EpochModel, end: EpochEnd, logs: dict[str, Any]) -> None:
    """Call the hooks in the order of Keras; the last batch stands for all."""
    for callback in callbacks:
        callback.on_train_batch_end(max(0, end.steps - 1), logs)
    for callback in callbacks:
        callback.on_epoch_end(end.epoch, logs)
    is_over = end.is_last or model.stop_training
    for callback in callbacks:
        if is_over:
            callback.on_train_end(logs)
        else:
            callback.on_epoch_begin(end.epoch + 1)
