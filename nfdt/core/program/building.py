"""Creating a model's variables from a batch's shapes, the same way on the client and on the workers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from nfdt.core.errors import ProtocolError
from nfdt.core.nests import flatten_structure, rebuild

MAX_BATCH_BYTES = 4 * 2**30


def describe_batch(batch: Any) -> dict[str, Any]:
    """A batch's nest with ``[shape, dtype]`` per array (its first dimension None), and its number of rows."""
    structure, arrays = flatten_structure(batch)
    rows = next((array.shape[0] for array in arrays if array.ndim), 1)
    described = [[[None, *array.shape[1:]] if array.ndim else [], array.dtype.str] for array in arrays]
    return {"structure": structure, "arrays": described, "rows": int(rows)}


def blank_batch(description: Mapping[str, Any]) -> Any:
    """A batch of zeros of the described shapes.

    Raises:
        ProtocolError: the description is malformed.
    """
    return rebuild(description["structure"], [_zeros(s, d, description["rows"]) for s, d in description["arrays"]])


def _zeros(shape: list[int | None], dtype: str, rows: int) -> np.ndarray[Any, Any]:
    full = [rows if n is None else n for n in shape]
    if np.dtype(dtype).hasobject or not 0 <= math.prod(full) * np.dtype(dtype).itemsize <= MAX_BATCH_BYTES:
        raise ProtocolError(
            f"Program input: expected numbers, booleans or strings of at most {MAX_BATCH_BYTES} bytes per batch. "
            f"Received: {dtype} of shape {full}."
        )
    return np.zeros(full, dtype)


def build_model(model: Any, batch: Any) -> None:
    """Create the variables of model, metrics and loss; the optimizer's are left to the caller.

    Args:
        model: A compiled Keras model.
        batch: A nest of arrays of the shapes and dtypes that the model will be trained on; values do not matter.

    Raises:
        Exception: whatever the model's own code raises for such a batch, as in ``fit``.
    """
    structure, arrays = flatten_structure(batch)
    optimizer, model.optimizer = model.optimizer, None
    try:
        failure = _try_symbolically(
            model, rebuild(structure, [_Spec([None, *a.shape[1:]], tf.as_dtype(a.dtype)) for a in arrays])
        )
        if failure is not None:  # a model for batches of one size
            failure = _try_symbolically(
                model, rebuild(structure, [_Spec([*a.shape], tf.as_dtype(a.dtype)) for a in arrays])
            )
    finally:
        model.optimizer = optimizer
    if failure is None:
        return
    # A model that only train_step() knows how to call: trace that, as fit() would, without running it.
    tensors = [tf.convert_to_tensor(array) for array in arrays]
    tf.function(model.train_step).get_concrete_function(rebuild(structure, tensors))


@dataclass(frozen=True)
class _Spec:
    shape: list[int | None]
    dtype: Any


def _try_symbolically(model: Any, specs: Any) -> Exception | None:
    try:
        model._symbolic_build(data_batch=specs)  # private: Keras builds symbolically inside fit() only
    except Exception as error:
        return error
    return None
