"""Metric states of workers and their merge: pure NumPy, named arrays in and out.

==================  ================================================================================  ==============
name                content                                                                           merged by
==================  ================================================================================  ==============
``sum/<i>``         increase of the i-th metric variable since its metric was reset                   sum
``mean/<i>``        the same times ``steps``: a variable with ``aggregation="mean"``                  sum
``each/<i>``        its value, shape ``(1, ...)``: a variable of a metric with ``merge_state``        concatenation
``steps``           number of counted steps                                                           sum
``log/<name>``      last value of a log that the steps return themselves, times ``samples/<name>``    sum
``samples/<name>``  number of samples that it represents                                              sum
==================  ================================================================================  ==============

Merging is associative: ranks merge their states, and the server merges those of groups and parts of validation data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import ShapeMismatch

MetricArrays = Mapping[str, Array]

VARIABLES = ("sum", "mean", "each")
MEAN, EACH, LOG, SAMPLES = "mean/", "each/", "log/", "samples/"


def merge_metric_states(states: Sequence[bytes]) -> bytes:
    """Merge the metrics of several workers into one state; empty if no worker has counted a step.

    Args:
        states: Encoded states, safetensors each; an empty one has counted no step.

    Raises:
        ShapeMismatch: the workers have different variables.
    """
    counted = [state for state in states if state]
    if len(counted) < 2:
        return counted[0] if counted else b""
    return dump_arrays(merge_metrics([load_arrays(state) for state in counted]))


def merge_metrics(states: Sequence[MetricArrays]) -> dict[str, Array]:
    """Merge decoded states, at least one; see :func:`merge_metric_states`."""
    _check_alike(states)
    merged = {}
    for name in dict.fromkeys(name for state in states for name in state):
        found = [state[name] for state in _having(states, name)]
        merged[name] = np.concatenate(found) if name.startswith(EACH) else _sum(found)
    return merged


def own_logs(state: MetricArrays) -> dict[str, Array]:
    """Return the steps' own logs of a merged state: the mean weighted by samples."""
    names = [name.removeprefix(LOG) for name in state if name.startswith(LOG)]
    return {name: np.asarray(state[LOG + name] / state[SAMPLES + name]).astype(np.float32) for name in names}


def variable_shapes(state: MetricArrays) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the metric variables in a state, by name."""
    named = {name: array for name, array in state.items() if name.partition("/")[0] in VARIABLES}
    return {name: array.shape[name.startswith(EACH) :] for name, array in named.items()}


def _having(states: Sequence[MetricArrays], name: str) -> list[MetricArrays]:
    """Return the states that contain a name; of logs, which may differ in shape, only those shaped like the first."""
    log = LOG + name.partition("/")[2] if name.startswith((LOG, SAMPLES)) else name
    having = [state for state in states if log in state]
    return [state for state in having if log is name or state[log].shape == having[0][log].shape]


def _check_alike(states: Sequence[MetricArrays]) -> None:
    expected, *others = map(variable_shapes, states)
    for received in others:
        if received != expected:
            raise ShapeMismatch(
                f"Metrics of several workers: expected the same variables. Received: {expected} and {received}. "
                "A worker runs another model; restart it."
            )


def _sum(values: Sequence[Array]) -> Array:
    dtype = values[0].dtype
    wide = np.float64 if dtype.kind == "f" else dtype
    return np.asarray(np.sum(np.stack(values), axis=0, dtype=wide)).astype(dtype)


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return those logs of a step that are numbers, or arrays of one, as F1Score of one class."""
    return {name: _number(value) for name, value in logs.items() if math.prod(value.shape) == 1}


def _number(value: Any) -> float:
    return float(np.asarray(value).reshape(())) if len(value.shape) else float(value)
