"""Checks on the client, before anything is sent, that several workers evaluate and predict as one process does.

The model's own steps are tried out on one batch. The increases of each metric variable are summed over the workers.
This is exact if an update adds to the variable whatever its value, as in Keras' own metrics. Other metrics are tested
on the batch, in different states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.layout import Array
from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import StepName, as_tensors, current
from nfdt.model.backends.variables import Values, assign_values, preserved, values_of
from nfdt.model.program.compiling import leaf_metrics, merges_itself, overrides
from nfdt.model.program.dry_run import without_effects
from nfdt.model.program.untrained import SEED_STATE, untrained_variables

_TOLERANCE = 1e-4
_FACTORS = (1.0, 1e6)
_UNSENT = ("bfloat16", "string")  # types of outputs that NumPy does not have


class NotRepeatable(Exception):
    """The result depends on more than the weights and the rows of each batch; the message is the reason."""


def check_evaluate(model: Any, batch: Any) -> None:
    """Check that the metrics of several workers make up those of the model.

    Args:
        model: A compiled, built model.
        batch: One batch, as ``test_step`` receives it.

    Raises:
        NotRepeatable: they do not.
        Exception: any exception of the model's own code.
    """
    try:
        own = check_metrics(model, batch, batch)
    except CaptureError as error:
        raise NotRepeatable(str(error)) from error
    if own:
        raise NotRepeatable(f"test_step returns logs that are no results of metrics: {', '.join(own)}")
    _without_changes(model, "test_step", batch)


def check_predict(model: Any, batch: Any, limit_bytes: int) -> Any:
    """Return the outputs for a batch, which have the structure of the outputs for all.

    Args:
        model: A compiled, built model.
        batch: One batch, as ``predict_step`` receives it.
        limit_bytes: Size limit of the outputs.

    Raises:
        NotRepeatable: other rows may have an effect on them, or they cannot be sent.
        Exception: any exception of the model's own code.
    """
    outputs = _without_changes(model, "predict_step", batch)
    leaves = keras.tree.flatten(outputs)
    for leaf in leaves:
        if not keras.ops.is_tensor(leaf) or not leaf.shape or keras.backend.standardize_dtype(leaf.dtype) in _UNSENT:
            raise NotRepeatable(f"an output is not an array of numbers with rows: {type(leaf).__name__}")
    if (size := sum(keras.ops.convert_to_numpy(leaf).nbytes for leaf in leaves)) > limit_bytes:
        raise NotRepeatable(f"the outputs of a batch have {size} bytes, more than {limit_bytes}")
    return outputs


def _without_changes(model: Any, step: StepName, batch: Any) -> Any:
    """Return the result of a step, which must not change a variable; metrics keep their values.

    Raises:
        NotRepeatable: it changes one, as layers do that carry state from batch to batch.
    """
    watched = [v for v in (*model.trainable_variables, *untrained_variables(model)) if v.name != SEED_STATE]
    known = Values(watched)
    with preserved(list(model.metrics_variables)), without_effects(model):
        result = current().run_step(model, step, as_tensors(batch))
        changed = known.changed()
    for variable, differs in zip(watched, changed, strict=True):
        if differs:
            raise NotRepeatable(f"a batch changes the variable {variable.path!r}")
    return result


def check_metrics(model: Any, batch: Any, validation: Any = None) -> list[str]:
    """Refuse metrics that cannot be merged.

    Args:
        model: A compiled, built model.
        batch: One batch of the training data.
        validation: One batch of the validation data that workers will evaluate, or None.

    Returns:
        Logs of ``test_step`` that are no results of metrics, by name: workers cannot report them. Often none.

    Raises:
        CaptureError: the updates of a metric are not additive; the message names it.
        Exception: any exception of the model's own code for such a batch.
    """
    # ``aggregation`` does not tell: Keras' default is "sum", also for a maximum (decision 21).
    unproven = [metric for metric in leaf_metrics(model) if not _is_additive(metric)]
    own = validation is not None and (overrides(model, "test_step") or overrides(model, "compute_metrics"))
    if not unproven and not own:
        return []
    with without_effects(model), _tried_out(unproven):
        if unproven:
            step: StepName = "train_step" if overrides(model, "train_step") else "test_step"
            current().run_step(model, step, as_tensors(batch))
        if validation is None:
            return []
        logs = _names(current().run_step(model, "test_step", as_tensors(validation)))
        results = _names(model.get_metrics_result())
        return [] if logs == results else sorted(logs - results) or sorted(logs)


def _is_additive(metric: Any) -> bool:
    """Return whether a metric is known to be mergeable: it has Keras' own update and reset, or ``merge_state``."""
    methods = (getattr(type(metric), name) for name in ("update_state", "reset_state"))
    return merges_itself(metric) or all(m.__module__.startswith("keras.") for m in methods)


def _names(logs: Any) -> set[str]:
    if not isinstance(logs, Mapping):
        return set()
    nested = [_names(value) for value in logs.values() if isinstance(value, Mapping)]
    return {str(name) for name, value in logs.items() if not isinstance(value, Mapping)}.union(*nested)


@contextlib.contextmanager
def _tried_out(metrics: Sequence[Any]) -> Iterator[None]:
    """Test every update of these metrics in the block."""

    def tried(metric: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        def update_state(*args: Any, **kwargs: Any) -> Any:
            _require_additive(metric, lambda: update(*args, **kwargs))
            return update(*args, **kwargs)

        return update_state

    with contextlib.ExitStack() as undo:
        for metric in metrics:
            vars(metric)["update_state"] = tried(metric, metric.update_state)
            undo.callback(vars(metric).pop, "update_state")
        yield


def _require_additive(metric: Any, update: Callable[[], Any]) -> None:
    held = values_of(metric.variables)
    update()  # which may create the variables
    metric.reset_state()
    start = values_of(metric.variables)
    gains = _gains(metric, update, start)
    for variable, shifted in _shifted(metric, start, gains):
        try:
            same = _agree(metric, shifted, gains, _gains(metric, update, shifted))
        except Exception:  # in a state that its own updates never reach
            same = False
        if not same:
            raise CaptureError(
                f"Metric {metric.name!r} ({type(metric).__name__}): what several workers count cannot be merged, for "
                f"an update does not add to its variable {variable.name!r}: what comes out depends on what it holds, "
                "as in a maximum or a moving average. Expected: variables that updates add to, or a method "
                "merge_state(self, metrics), which takes over the state of other metrics of the class."
            )
    metric.reset_state()
    for variable, before, after in zip(metric.variables, start, values_of(metric.variables), strict=True):
        if not np.array_equal(before, after, equal_nan=before.dtype.kind == "f"):
            raise CaptureError(
                f"Metric {metric.name!r} ({type(metric).__name__}): reset_state() leaves something in its variable "
                f"{variable.name!r}, which every worker would count on its own. Expected: the same value after each."
            )
    assign_values(metric.variables, [*held, *start[len(held) :]])


def _gains(metric: Any, update: Callable[[], Any], start: Sequence[Array]) -> list[Array]:
    """Return the amounts that an update adds to the variables when they hold ``start``."""
    assign_values(metric.variables, start)
    update()
    after = [np.asarray(value, np.float64) for value in values_of(metric.variables)]
    with np.errstate(invalid="ignore"):
        return [np.where(a == s, 0.0, a - s.astype(np.float64)) for a, s in zip(after, start, strict=True)]


def _shifted(metric: Any, start: Sequence[Array], gains: Sequence[Array]) -> Iterator[tuple[Any, list[Array]]]:
    """Yield (variable, state) for states in which one variable has another value."""
    for index, variable in enumerate(metric.variables):
        if variable.aggregation == "mean":
            continue
        value = start[index]
        if value.dtype.kind == "b":
            others = [~value]
        else:  # shifted by about the update's gain, and by much more than any value
            scale, (greatest, _) = _scale(value, gains[index]), _limits(value.dtype)
            shifts = [np.ceil(np.minimum(factor * scale, greatest / 4)).astype(value.dtype) for factor in _FACTORS]
            others = [value + shift for shift in shifts]
            others += [value - shift for shift in shifts if value.dtype.kind != "u"]
        for other in others:
            yield variable, [*start[:index], other, *start[index + 1 :]]


def _agree(metric: Any, start: Sequence[Array], gains: Sequence[Array], others: Sequence[Array]) -> bool:
    """Return whether ``others``, the gains from ``start``, equal ``gains`` up to rounding.

    Variables with ``aggregation="mean"`` are ignored.
    """
    for variable, value, gain, other in zip(metric.variables, start, gains, others, strict=True):
        if variable.aggregation == "mean":
            continue
        known = ~np.isnan(gain)
        allowed = max(_TOLERANCE, 16 * _limits(value.dtype)[1]) * _scale(value, gain)
        if np.any(np.isinf(gain)) or np.any(np.abs(other - gain)[known] > allowed[known]):
            return False
    return True


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the greatest number of a type, and the distance from 1 to the next; NumPy does not support bfloat16."""
    if dtype.kind in "iub":
        return float(np.iinfo(dtype).max) if dtype.kind != "b" else 1.0, 0.0
    return (float(np.finfo(dtype).max), float(np.finfo(dtype).eps)) if dtype.kind == "f" else (3e38, 2.0**-7)


def _scale(*values: Array) -> Array:
    """Return the summed magnitude of the values, at least 1."""
    finite = [np.nan_to_num(value.astype(np.float64), posinf=0.0, neginf=0.0) for value in values]
    return np.asarray(1.0 + sum(np.abs(value) for value in finite))
