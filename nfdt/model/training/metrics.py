"""A model's metrics: the state of one worker, and the logs computed from the merged state of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import CaptureError, ShapeMismatch
from nfdt.model.backends.variables import assign_values, preserved, values_of
from nfdt.model.program.compiling import leaf_metrics, merges_itself
from nfdt.model.training.metric_states import EACH, LOG, MEAN, SAMPLES, own_logs, variable_shapes

LogValue = float | list[Any]


@dataclass(frozen=True)
class MetricsAside:
    """Metrics that were set aside: values of the variables that there were, by name, and counts."""

    values: Mapping[str, Array]
    steps: int
    samples: int
    logs: Mapping[str, Any]


class ModelMetrics:
    """The metrics of one worker's model.

    Args:
        model: A compiled, built model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._steps = self._samples = 0
        self._logs: Mapping[str, Any] = {}
        self._bases: dict[str, Array] = {}  # values after the last reset, once they were needed

    def reset(self) -> None:
        """Reset all metrics and counts."""
        self._model.reset_metrics()
        self._steps = self._samples = 0
        self._logs, self._bases = {}, {}

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore the values and counts at the end of a block."""
        counts = self._steps, self._samples, self._logs
        with preserved(list(self._named_variables().values())):
            yield
            self._model.reset_metrics()  # also those that have got their variables in the block
        self._steps, self._samples, self._logs = counts

    def stepped(self, samples: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count a step of the model, which has updated its metrics; ``logs``: its return value, tensors by name."""
        self._steps += 1
        self._samples += samples
        self._logs = logs or {}

    def collect(self) -> bytes:
        """Return the state since the reset, for :func:`~nfdt.model.training.metric_states.merge_metric_states`.

        The metrics keep their values. The state is empty without a step since the reset.
        """
        if not self._steps:  # metrics that create their variables at the first update have none yet
            return b""
        named = self._named_variables()
        held = dict(zip(named, values_of(named.values()), strict=True))
        # A state has what was gained since the reset: gains of several workers add up, values do not (decision 21).
        if self._bases.keys() != held.keys():
            self._model.reset_metrics()
            self._bases = dict(zip(named, values_of(named.values()), strict=True))
            assign_values(named.values(), held.values())
        state: dict[str, Array] = {"steps": np.asarray(self._steps, np.int64)}
        for name, value in held.items():
            state[name] = _gain(name, value, self._bases[name], self._steps)
        for name, log in self._logs.items():
            state[LOG + name] = np.asarray(log, np.float64) * self._samples
            state[SAMPLES + name] = np.asarray(self._samples, np.float64)
        return dump_arrays(state)

    def set_aside(self) -> MetricsAside:
        """Reset all metrics and counts, and return what they were for :meth:`take_back`."""
        named = self._named_variables()
        values = dict(zip(named, values_of(named.values()), strict=True))
        held = MetricsAside(values, self._steps, self._samples, self._logs)
        self.reset()
        return held

    def take_back(self, held: MetricsAside) -> None:
        """Replace all metrics and counts by those that were set aside."""
        bases = self._bases
        self.reset()
        self._bases, named = bases, self._named_variables()
        assign_values([named[name] for name in held.values], held.values.values())
        self._steps, self._samples, self._logs = held.steps, held.samples, held.logs

    def load(self, state: bytes) -> None:
        """Restore the metrics from the state that a worker collected.

        Raises:
            ShapeMismatch: the state belongs to another model.
        """
        self.reset()
        if not state:
            return
        arrays = load_arrays(state)
        self._load(arrays)
        self._steps = int(arrays["steps"])
        self._logs = own_logs(arrays)
        self._samples = int(max((v for name, v in arrays.items() if name.startswith(SAMPLES)), default=0))

    def logs(self, state: bytes, running: Mapping[str, float]) -> dict[str, LogValue]:
        """Return the logs of a merged state, numbers and nested lists of numbers, under the names of Keras' History.

        If a step returns exactly the results of the metrics, these are the logs. Otherwise the logs are those that the
        step returns, with the merged results for the metrics that it has updated.

        Args:
            state: Merged state.
            running: Running logs, used if the state is empty because no worker with counts is left. An epoch
                without steps has none: as in Keras, its logs are the results of metrics without updates.

        Raises:
            CaptureError: the result of a metric is not numeric.
        """
        if not state and running:
            return dict(running)
        self._model.reset_metrics()
        if not state:
            return {name: _plain(value) for name, value in self._results().items()}
        arrays = load_arrays(state)
        own = own_logs(arrays)
        untouched = self._results() if own else {}
        self._load(arrays)
        results = self._results()
        if not own or own.keys() == results.keys():
            return {name: _plain(value) for name, value in results.items()}
        moved = {name: value for name, value in results.items() if not _same(value, untouched.get(name))}
        return {name: _plain(moved.get(name, value)) for name, value in own.items()}

    def summary(self, state: bytes, validation: bytes, running: Mapping[str, float]) -> dict[str, Any]:
        """Return the logs of an epoch and, where it was validated, of the validation; see :meth:`logs`."""
        validated = self.logs(validation, {}) if validation else None
        return {"logs": self.logs(state, running), "val_logs": validated}

    def _named_variables(self) -> dict[str, Any]:
        """Return the metric variables by their names in a state."""
        pairs = [(metric, variable) for metric in leaf_metrics(self._model) for variable in metric.variables]
        return {f"{_rule(metric, variable)}/{i}": variable for i, (metric, variable) in enumerate(pairs)}

    def _load(self, state: Mapping[str, Array]) -> None:
        """Add a state to metrics that were just reset."""
        named = self._named_variables()
        bases = values_of(named.values())
        expected = {name: base.shape for name, base in zip(named, bases, strict=True)}
        if expected != (received := variable_shapes(state)):
            raise ShapeMismatch(
                f"Metrics: expected the variables {expected}. Received: {received}. The sender runs another model."
            )
        for (name, variable), base in zip(named.items(), bases, strict=True):
            if not name.startswith(EACH):
                variable.assign(_moved(name, base, state[name], int(state["steps"])))
        names = {id(variable): name for name, variable in named.items()}
        for metric in leaf_metrics(self._model):
            if merges_itself(metric):
                _merge(metric, [state[names[id(variable)]] for variable in metric.variables])

    def _results(self) -> dict[str, Array]:
        return dict(_flat(self._model.get_metrics_result()))


def _rule(metric: Any, variable: Any) -> str:
    if merges_itself(metric):
        return "each"
    return "mean" if variable.aggregation == "mean" else "sum"


def _gain(name: str, value: Array, base: Array, steps: int) -> Array:
    if name.startswith(EACH):
        return value[None]
    wide = np.float64 if name.startswith(MEAN) else np.int8 if value.dtype.kind == "b" else value.dtype
    with np.errstate(invalid="ignore"):
        gain = np.where(value == base, 0, value.astype(wide) - base.astype(wide)).astype(wide)  # 0 if both are infinite
    return gain * steps if name.startswith(MEAN) else gain


def _moved(name: str, base: Array, gain: Array, steps: int) -> Array:
    return np.asarray(base + (gain / steps if name.startswith(MEAN) else gain)).astype(base.dtype)


def _merge(metric: Any, rows: Sequence[Array]) -> None:
    """Assign the first row of each variable to a metric, and merge metrics with the other rows into it."""
    others = [_twin(metric, {}) for _ in range(1, len(rows[0]) if rows else 0)]
    for index, holder in enumerate([metric, *others]):
        assign_values(holder.variables, [row[index] for row in rows])
    if others:
        metric.merge_state(others)


def _twin(value: Any, twins: dict[int, Any]) -> Any:
    """Copy a metric with its own variables, without Keras' copy, which needs the script's classes registered.

    Args:
        value: A metric, or a value that a metric holds.
        twins: Copies so far, by the identity of their originals.
    """
    if id(value) in twins:
        return twins[id(value)]
    if isinstance(value, keras.Variable):
        twins[id(value)] = keras.Variable(value.numpy(), dtype=value.dtype, trainable=False, name=value.name)
    elif isinstance(value, keras.metrics.Metric):
        twins[id(value)] = twin = object.__new__(type(value))
        vars(twin).update({name: _twin(each, twins) for name, each in vars(value).items()})
    elif isinstance(value, list):
        return [_twin(each, twins) for each in value]
    elif type(value) is tuple:
        return tuple(_twin(each, twins) for each in value)
    elif isinstance(value, dict):
        return {name: _twin(each, twins) for name, each in value.items()}
    return twins.get(id(value), value)


def _flat(results: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    """Yield numbers and arrays by name, nested dictionaries flattened as in Keras."""
    for name, value in results.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
            continue
        array = np.asarray(value)
        try:
            yield str(name), array if array.dtype.kind in "biuf" else array.astype(np.float32)  # bfloat16
        except (TypeError, ValueError):
            raise CaptureError(f"Metric {name!r}: expected numbers as its result. Received: {value!r}.") from None


def _same(one: Array, other: Array | None) -> bool:
    return other is not None and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _plain(array: Array) -> LogValue:
    return float(array) if array.ndim == 0 else array.tolist()
