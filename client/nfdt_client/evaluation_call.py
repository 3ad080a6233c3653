"""Calls of ``evaluate`` and ``predict``: whether the cluster can carry them out, their data, and the time they save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.errors import UsageError
from nfdt_client import callbacks, training_data
from nfdt_client.training_data import Arrays

_FUNCTIONS = {"evaluate": "make_test_function", "predict": "make_predict_function"}
_HOOKS = {
    "evaluate": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}
BATCH_S = 0.3e-3  # work of Keras for a batch besides the model's own, in seconds
START_S = 1.0  # job of warm slots
FORWARD_SHARE = 1 / 3  # time of a forward pass, of that of a training step
LINK_BYTES_S = 100e6  # rate at which data reach a server on another machine
LEAST_S = 2.0  # a call that saves less is not distributed by default


class RunsHere(Exception):
    """A call that Keras carries out in this process; the message is the reason."""


@dataclass(frozen=True)
class Call:
    """One call, which the cluster can carry out.

    Attributes:
        method: ``evaluate`` or ``predict``.
        model: The user's model.
        arguments: Arguments by name, defaults filled in.
        data: The data.
    """

    method: str
    model: Any
    arguments: Mapping[str, Any]
    data: Arrays


def check_call(method: str, model: Any, arguments: Mapping[str, Any]) -> None:
    """Check everything that needs no look into the data.

    Raises:
        RunsHere: the cluster cannot carry the call out, or Keras refuses it.
    """
    _check_model(method, model)
    if arguments.get("kwargs"):
        raise RunsHere("it has arguments that Keras does not know")
    if any(_watches(callback, _HOOKS[method]) for callback in callbacks.each(arguments["callbacks"])):
        raise RunsHere("a callback has hooks between batches")
    if arguments["x"] is None or not training_data.is_arrays(_data(arguments)):
        raise RunsHere("its data are not arrays")


def read_call(method: str, model: Any, arguments: Mapping[str, Any]) -> Call:
    """Return a checked call with its data.

    Raises:
        RunsHere: Keras refuses the data, or they have fewer batches than ``steps``.
    """
    try:
        data = training_data.read(*_data(arguments), batch_size=arguments["batch_size"], shuffle=False)
    except UsageError as error:
        raise RunsHere(f"Keras refuses its data: {error}") from error
    assert isinstance(data, Arrays)
    return Call(method, model, arguments, _cut(data, arguments["steps"], int(model.steps_per_execution or 1)))


def _data(arguments: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    return arguments["x"], arguments.get("y"), arguments.get("sample_weight")


def _check_model(method: str, model: Any) -> None:
    from nfdt.model.keras_internals import models as keras_models
    from nfdt.model.program.compiling import overrides

    if not (model.compiled and model.built and model.optimizer):
        raise RunsHere("the model is not compiled with an optimizer, or not built")
    if keras_models.distribution_strategy(model) is not None:
        raise RunsHere("the model was made under a strategy of tf.distribute")
    name = _FUNCTIONS[method]
    if overrides(model, name) or name in vars(model):
        raise RunsHere(f"the model has its own {name}()")


def _watches(callback: Any, hooks: Sequence[str]) -> bool:
    """Whether a callback that is not Keras' own has one of these hooks."""
    from nfdt.model.keras_internals import training as keras_training

    for method in (getattr(callback, hook) for hook in hooks):
        of_keras = str(getattr(method, "__module__", "")).startswith("keras.")
        if not of_keras and not keras_training.is_default_hook(method):
            return True
    return False


def _cut(data: Arrays, steps: int | None, steps_per_execution: int) -> Arrays:
    """Return the rows that ``steps`` leave; Keras ends with whole executions."""
    from nfdt.model.keras_internals import models as keras_models

    batches = keras_models.limited_batches(steps, steps_per_execution)
    if batches is None:
        return data
    if batches > data.batches:
        raise RunsHere("it has more steps than the data have batches")
    return data.head(batches * data.batch_size)


def estimate_gain(record: Mapping[str, Any], arguments: Mapping[str, Any], *, remote: bool) -> float:
    """Return the seconds that the cluster saves; negative if it is slower.

    ::

        saved = batches * BATCH_S + compute * (1 - 1 / devices) - START_S - bytes / LINK_BYTES_S

    ``compute`` is the time of all forward passes on one device, by the speeds of the last fit, and ``devices`` is the
    number of machines and GPUs of the workers. Workers on one machine share its cores, which Keras alone uses as well:
    they only save what Keras does besides.

    Args:
        record: ``history.nfdt`` of the last fit of the model.
        arguments: Arguments of the call by name; its data are arrays.
        remote: Whether the server is another machine.
    """
    arrays = training_data.leaves([arguments.get(name) for name in ("x", "y", "sample_weight")])
    samples, size = len(arrays[0]), int(arguments["batch_size"] or 32)
    if arguments["steps"]:
        samples = min(samples, int(arguments["steps"]) * size)
    measured = [worker for worker in record.values() if worker.get("step_s") and worker.get("batch_size")]
    if not measured:
        return -START_S
    sample_s = min((one["step_s"] - one.get("step_exchange_s", 0.0)) / one["batch_size"] for one in measured)
    devices = {(worker.get("host"), worker.get("device")) for worker in record.values()}
    compute_s = FORWARD_SHARE * samples * max(0.0, sample_s)
    sent = sum(int(getattr(array, "nbytes", 0)) for array in arrays) if remote else 0
    return -(-samples // size) * BATCH_S + compute_s * (1 - 1 / len(devices)) - START_S - sent / LINK_BYTES_S
