"""Creation of a model's variables from the shapes of a batch, identical on the client and on the workers.

Layers for texts and categories also have files, their vocabularies.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.pytree import flatten_structure, rebuild
from nfdt.core.errors import ProtocolError
from nfdt.model.backends.contract import StepName
from nfdt.model.keras_internals.models import (
    build_symbolically,
    flatten_layers,
    is_unbuilt_stack,
    set_stacked_layers,
    stacked_layers,
)
from nfdt.model.keras_internals.training import is_built_metric
from nfdt.model.program.compiling import leaf_metrics, overrides
from nfdt.model.program.dry_run import trace, without_effects, without_updates

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 * 2**30


def describe_batch(batch: Any) -> dict[str, Any]:
    """Describe a batch: its pytree with ``[shape, dtype]`` per array, and its number of rows.

    The first dimension is None where it is that number. Sparse and ragged arrays are described without elements.
    """

    def without_elements(leaf: Any) -> Any:
        return leaf.blank() if isinstance(leaf, SparseArray | RaggedArray) else leaf

    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    rows = next((int(leaf.shape[0]) for leaf in leaves if leaf.ndim), 1)
    structure, arrays = flatten_structure(keras.tree.map_structure(without_elements, batch))
    shapes = [[None if axis == 0 and n == rows else n for axis, n in enumerate(array.shape)] for array in arrays]
    described = [[shape, array.dtype.str] for shape, array in zip(shapes, arrays, strict=True)]
    return {"structure": structure, "arrays": described, "rows": rows}


def blank_batch(description: Mapping[str, Any]) -> Any:
    """Return a batch of zeros of the described shapes.

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


def build_model(model: Any, batch: Any, *, predicts: bool = False) -> None:
    """Create the variables of model, metrics and loss; the caller creates the optimizer's.

    Args:
        model: A compiled Keras model.
        batch: A pytree of arrays with the shapes and dtypes of the training data; values do not matter.
        predicts: Whether the batch has no targets, as for ``predict``; metrics and loss are not built then.

    Raises:
        Exception: any exception of the model's own code for such a batch, as in ``fit``.
    """
    if predicts:
        _trace(model, "predict_step", batch)
        return
    # Keras also calls a model without call(), and marks it as built.
    called = overrides(model, "call") and _build_by_call(model, batch)
    if not called or (overrides(model, "train_step") and not all(layer.built for layer in flatten_layers(model))):
        _trace(model, "train_step", batch)  # layers that only its train_step calls, or a user's error
    _build_metrics(model, batch)


def _build_by_call(model: Any, batch: Any) -> bool:
    """Build for batches of any size, or else of this size; return whether the model can be called on the batch."""

    def specs(*, any_size: bool) -> Any:
        def spec(leaf: Any) -> Any:
            if leaf is None:
                return None
            shape = [None, *leaf.shape[1:]] if leaf.ndim and any_size else list(leaf.shape)
            is_text = leaf.dtype.kind in "OSU"
            dtype = "string" if is_text else keras.backend.standardize_dtype(leaf.dtype)
            return SimpleNamespace(shape=shape, dtype=dtype)

        return keras.tree.map_structure(spec, batch)

    return any(_build_symbolically(model, specs(any_size=any_size)) for any_size in (True, False))


def _build_metrics(model: Any, batch: Any) -> None:
    """Create the variables of metrics that create them at their first update, by tracing the model's own steps."""
    steps: tuple[StepName, ...] = ("train_step", "test_step")
    for step in steps:
        if all(map(is_built_metric, leaf_metrics(model))):
            return
        try:
            _trace(model, step, batch)
        except Exception as error:  # fit() will raise it too, if it persists
            logger.debug("No trace of %s for its metrics: %s", model.name, error)


def _trace(model: Any, step: StepName, batch: Any) -> None:
    """Trace a step as ``fit`` would, without an update; an eager model runs it, without effects."""
    with without_effects(model) if model.run_eagerly else without_updates(model):
        trace(model, step, batch)


def _build_symbolically(model: Any, specs: Any) -> bool:
    unbuilt = [(layer, stacked_layers(layer)) for layer in flatten_layers(model) if is_unbuilt_stack(layer)]
    optimizer, model.optimizer = model.optimizer, None
    try:
        build_symbolically(model, specs)
    except Exception as error:
        logger.debug("No symbolic build of %s: %s", model.name, error)
        for layer, members in unbuilt:
            if is_unbuilt_stack(layer):  # it keeps the failed input and would reject the next one
                set_stacked_layers(layer, members)
        return False
    finally:
        model.optimizer = optimizer
    return True


def _layers_with(model: Any, method: str) -> dict[int, Any]:
    return {index: layer for index, layer in enumerate(flatten_layers(model)) if hasattr(layer, method)}


def save_assets(model: Any, store: Callable[[bytes], str]) -> dict[str, dict[str, str]]:
    """Store each layer's files and return layer index -> file name -> artifact."""
    found: dict[str, dict[str, str]] = {}
    for index, layer in _layers_with(model, "save_assets").items():
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            files = {path.name: store(path.read_bytes()) for path in sorted(Path(folder).iterdir())}
        if files:
            found[str(index)] = files
    return found


def load_assets(model: Any, assets: Mapping[str, Mapping[str, str]], read: Callable[[str], bytes | memoryview]) -> None:
    """Load each layer's files into it.

    Raises:
        ProtocolError: the layer accepts no files, or a file name leaves the folder.
    """
    layers = _layers_with(model, "load_assets")
    for index, files in assets.items():
        if int(index) not in layers:
            raise ProtocolError(f"Program: expected assets for the layers {sorted(layers)}. Received: layer {index}.")
        with tempfile.TemporaryDirectory() as folder:
            for name, artifact in files.items():
                if name != Path(name).name or name in ("", ".", ".."):
                    raise ProtocolError(f"Program: expected a plain file name. Received: {name!r}.")
                Path(folder, name).write_bytes(read(artifact))
            layers[int(index)].load_assets(folder)
