"""A forward pass of the script's model, which every worker repeats before it trains.

A worker that has built another model would train without an error. The program therefore contains the outputs of a few
samples, computed with ``training=False``, fixed seeds and the weights that the program starts with.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.layout import Array
from nfdt.core.arrays.pytree import flatten_structure, rebuild
from nfdt.core.arrays.table_rows import Rows, RowVector
from nfdt.core.errors import ModelMismatch
from nfdt.model.backends.contract import as_tensors, current
from nfdt.model.backends.variables import preserved
from nfdt.model.keras_internals.data import unpack_batch
from nfdt.model.keras_internals.models import flatten_layers
from nfdt.model.keras_internals.training import seeded
from nfdt.model.program.described import describe_layers, first_difference
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.untrained import untrained_variables

logger = logging.getLogger(__name__)

ROWS = 4
_SEED = 1
_TOLERANCE = 2e-3
_LOW_TOLERANCE = 5e-2  # of layers that compute in 16 bits
_LOSSES = "losses"


def record_outputs(model: Any, batch: Any, *, may_vary: bool) -> bytes | None:
    """Return the outputs of a model for the first samples of a batch, its inputs, and a description of its layers.

    Args:
        model: A built model.
        batch: A batch as ``train_step`` receives it: x, (x, y) or (x, y, sample_weight).
        may_vary: Whether a second call may have other outputs, as with code of the script; it is then tried.

    Returns:
        Arrays as ``.npz``; None if the model cannot be called with x alone, if its inputs are sparse or ragged, or if
        a second call with the same seeds has other outputs.
    """
    x, _, _ = unpack_batch(batch)
    structure, arrays = flatten_structure(x)
    if any(isinstance(array, SparseArray | RaggedArray) for array in arrays):
        return None
    for rows in (ROWS, None):  # a model of a fixed batch size takes whole batches only
        inputs = [array[:rows] if array.ndim else array for array in arrays]
        try:
            outputs = _outputs(model, rebuild(structure, inputs))
        except Exception as error:  # its own train_step may call it in another way
            logger.debug("No forward pass of %s with %s samples: %s", model.name, rows or "all", error)
            continue
        if may_vary and not _agree(outputs, _outputs(model, rebuild(structure, inputs)), _tolerance(model)):
            logger.info("%s has other outputs for the same inputs and seeds; workers cannot check them.", model.name)
            return None
        file = io.BytesIO()
        text = json.dumps({"inputs": structure, "layers": describe_layers(model)})
        named = {f"input/{index}": array for index, array in enumerate(inputs)}
        named |= {f"output/{name}": array for name, array in outputs.items()}
        np.savez(file, allow_pickle=False, text=np.asarray(text), **named)
        return file.getvalue()
    return None


def check_outputs(
    model: Any,
    manifest: Manifest,
    read: Callable[[str], bytes | memoryview],
    rows_of: Callable[[int, Array], Array] | None = None,
) -> None:
    """Compare the outputs of a rebuilt model with those of the script's.

    Args:
        model: The rebuilt model with the weights that the program starts with.
        manifest: The program.
        read: Returns an artifact's bytes by its sha256.
        rows_of: Returns rows, by their numbers, of a table on the shards, by its index among those; None: none is.

    Raises:
        ModelMismatch: they differ; the message names the first layer that differs, and its attribute.
    """
    check = manifest.check
    if check is None or check["state"] != manifest.state:  # the weights are others meanwhile
        return
    with np.load(io.BytesIO(read(check["artifact"])), allow_pickle=False) as stored:
        inputs = [stored[f"input/{index}"] for index in range(sum(name.startswith("input/") for name in stored))]
        text = json.loads(str(stored["text"]))
        expected = {name.removeprefix("output/"): stored[name] for name in stored if name.startswith("output/")}
    x = rebuild(text["inputs"], inputs)
    if rows_of is not None and (tables := current().lookups(model)) is not None:
        numbers = tables.numbers_of(lambda batch: model(batch, training=False))(x)
        rows = tuple(Rows(index, rows_of(table, index)) for table, index in enumerate(numbers))
        tables.assign(RowVector(np.zeros(0, np.float32), rows))
    received = _outputs(model, x)
    if not _agree(expected, received, _tolerance(model)):
        raise ModelMismatch(_message(model, text["layers"], expected, received))


def _message(model: Any, layers: list[Any], expected: Mapping[str, Array], received: Mapping[str, Array]) -> str:
    worst = {
        name: float(np.max(np.abs(array.astype("f8") - received[name].astype("f8")), initial=0.0))
        for name, array in expected.items()
        if name in received and array.shape == received[name].shape and array.dtype.kind in "biuf"
    }
    different = first_difference(model, layers) or "All plain attributes of its layers are equal."
    return (
        f"Model {model.name!r}: expected the outputs of the script's model for the same samples. Received: others "
        f"(greatest differences: {worst}). {different} Set what the layer computes with in its constructor, or "
        "as an attribute of the layer, not in an object that all processes make for themselves."
    )


def _outputs(model: Any, x: Any) -> dict[str, Array]:
    """Return the outputs of a model by number, and the sum of its own losses; the model does not change."""
    untrained, backend = untrained_variables(model), current()
    with seeded(_SEED), backend.seeded(_SEED), backend.full_precision(), preserved(untrained):
        outputs = model(as_tensors(x), training=False)
        losses = [keras.ops.convert_to_numpy(loss) for loss in model.losses]
    found = {str(index): _as_array(output) for index, output in enumerate(keras.tree.flatten(outputs))}
    return {**found, _LOSSES: np.asarray(sum(float(np.sum(loss)) for loss in losses))}


def _as_array(output: Any) -> Array:
    array = np.asarray(keras.ops.convert_to_numpy(output) if keras.ops.is_tensor(output) else output)
    return array.astype(np.float32) if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def _tolerance(model: Any) -> float:
    low = any(layer.compute_dtype in ("float16", "bfloat16") for layer in flatten_layers(model))
    return _LOW_TOLERANCE if low else _TOLERANCE


def _agree(expected: Mapping[str, Array], received: Mapping[str, Array], tolerance: float) -> bool:
    """Return whether outputs agree up to a share of the greatest output."""
    if expected.keys() != received.keys():
        return False
    for name, mine in expected.items():
        theirs = received[name]
        if mine.shape != theirs.shape:
            return False
        if mine.dtype.kind != "f":
            if not np.array_equal(mine, theirs):
                return False
            continue
        scale = float(np.max(np.abs(mine[np.isfinite(mine)]), initial=0.0))
        if not np.allclose(mine, theirs, rtol=0.0, atol=tolerance * scale + 1e-7, equal_nan=True):
            return False
    return True
