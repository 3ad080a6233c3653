"""Check on the client that workers can evaluate a model, or predict with it, as one process does.

The model's own step is tried out on the first batch.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import StepName, as_tensors, current
from nfdt.model.program.dry_run import without_effects
from nfdt.model.program.metrics import check_metrics
from nfdt.model.program.untrained import SEED_STATE, untrained_variables, values_of

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
        NotRepeatable: it does, or the model has layers whose state goes from batch to batch.
    """
    watched = [v for v in (*model.trainable_variables, *untrained_variables(model)) if v.name != SEED_STATE]
    before, metrics = values_of(watched), list(model.metrics_variables)
    counted = values_of(metrics)
    with without_effects(model):
        result = current().run_step(model, step, as_tensors(batch))
        after = values_of(watched)
    for variable, value in zip(metrics, counted, strict=True):
        variable.assign(value)
    for variable, old, new in zip(watched, before, after, strict=True):
        if not np.array_equal(old, new, equal_nan=old.dtype.kind == "f"):
            raise NotRepeatable(f"a batch changes the variable {variable.path!r}")
    return result
