"""Collective operations outside of an optimizer: reduce, gather and broadcast values of all ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hfdt.keras.compression import find_compressor
from hfdt.keras.horovod_api import horovod
from nfdt.core.errors import UsageError

# Types that Horovod cannot send, and a type of the same width that carries their bits.
CARRIERS = {tf.uint32: tf.int32, tf.uint64: tf.int64, tf.bfloat16: tf.int16}


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = None,
) -> Any:
    """Reduce a value over all ranks.

    Args:
        value: Anything convertible to a tensor; the same shape on every rank.
        name: Name of the operation; required if ranks call operations in different orders.
        average: Older form of ``op``: True is Average, False is Sum.
        prescale_factor: Multiplied before the reduction.
        postscale_factor: Multiplied after it.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        compression: A compressor as in ``DistributedOptimizer``, but not ``bf16``.

    Returns:
        A tensor, equal on all ranks.

    Raises:
        UsageError: both ``average`` and ``op`` are given, or bf16.
    """
    hvd = horovod()
    compressor = find_compressor(compression)
    if not getattr(compressor, "summable", True):
        raise UsageError("allreduce() cannot compress to bf16: use 'fp16' or 'none'. DistributedOptimizer can.")
    if average is not None and op is not None:
        raise UsageError("Expected either op or its older spelling average. Received both: leave average out.")
    if op is None:
        op = hvd.Sum if average is False else hvd.Average
    return hvd.allreduce(
        _tensor(value),
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compressor,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Return the values of all ranks, concatenated along the first dimension, which may differ between ranks."""
    tensor = _tensor(value)
    return _uncarried(horovod().allgather(_carried(tensor), name=name), tensor.dtype)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of ``root_rank`` on every rank; the shape must be the same everywhere."""
    tensor = _tensor(value)
    return _uncarried(horovod().broadcast(_carried(tensor), root_rank, name=name), tensor.dtype)


def reducescatter(value: Any, name: str | None = None, op: Any = None) -> Any:
    """Return this rank's part, along the first dimension, of the value reduced over all ranks (default: Average)."""
    hvd = horovod()
    return hvd.reducescatter(_tensor(value), name=name, op=hvd.Average if op is None else op)


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: Any = None) -> None:
    """Set variables to their values on ``root_rank``.

    Args:
        variables: Keras or TensorFlow variables; the same shapes in the same order on every rank.
        root_rank: Rank whose values are sent.
        process_set: Ranks that participate. Default: all.

    Raises:
        UsageError: ranks hold different variables.
    """
    hvd = horovod()
    variables = list(variables)
    ranks = hvd.global_process_set if process_set is None else process_set
    if not variables or not ranks.included() or ranks.size() == 1:
        return
    _check_same(variables, ranks)
    values = [_tensor(variable) for variable in variables]

    @tf.function
    def send(tensors: list[Any]) -> list[Any]:
        # All in one graph: Horovod then sends them together instead of one after the other.
        return [
            hvd.broadcast(_carried(tensor), root_rank, name=f"broadcast_variables.{i}", process_set=ranks)
            for i, tensor in enumerate(tensors)
        ]

    for variable, value, received in zip(variables, values, send(values), strict=True):
        variable.assign(_uncarried(received, value.dtype))


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Set a model's weights and its optimizer's state to their values on ``root_rank``.

    Args:
        root_rank: Rank whose values are sent.
        model: A built model. It is required, as Keras 3 has no list of all variables of a program.

    Raises:
        UsageError: no model, or the model is not built.
    """
    if model is None or not model.built:
        raise UsageError(
            f"broadcast_global_variables() needs the built model whose variables it shall send. Received: {model!r}. "
            "Call it as broadcast_global_variables(root_rank, model), or give fit() a BroadcastGlobalVariablesCallback."
        )
    broadcast_variables(shared_state(model), root_rank)


def shared_state(model: Any) -> list[Any]:
    """Return the variables to keep equal on all ranks: weights and optimizer state, not random seeds or metrics."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(optimizer.variables if optimizer is not None else ())]


def gather_json(value: Any) -> list[Any]:
    """Return the JSON value of each rank, in order of ranks."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(allgather(np.asarray([text.size], np.int64)))
    whole = np.asarray(allgather(text)).tobytes()
    ends = np.cumsum(lengths).tolist()
    return [json.loads(whole[end - int(length) : end]) for end, length in zip(ends, lengths, strict=True)]


def _check_same(variables: Sequence[Any], ranks: Any) -> None:
    described = [f"{keras.backend.standardize_dtype(v.dtype)}{tuple(v.shape)}" for v in variables]
    mine = np.asarray([[len(variables), zlib.crc32(" ".join(described).encode())]], np.int64)
    seen = np.asarray(horovod().allgather(mine, process_set=ranks))
    if not (seen == mine).all():
        raise UsageError(
            f"The ranks hold different variables. Expected: the same shapes in the same order on every rank. "
            f"Received: {seen[:, 0].tolist()} variables, checksums {seen[:, 1].tolist()}, in order of ranks. "
            "Build the same model, and its optimizer, on every rank before broadcasting."
        )


def _tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value.value if isinstance(value, keras.Variable) else value)


def _carried(tensor: Any) -> Any:
    carrier = CARRIERS.get(tensor.dtype)
    return tensor if carrier is None else tf.bitcast(tensor, carrier)


def _uncarried(tensor: Any, dtype: Any) -> Any:
    return tf.bitcast(tensor, dtype) if dtype in CARRIERS else tensor
