"""The embedding tables of a model: its variables whose gradients are of the rows that a batch looked up."""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

import keras

from nfdt.model.backends.contract import current
from nfdt.model.keras_internals.models import flatten_layers, own_variables
from nfdt.model.program.collect import is_keras_own
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.row_updates import MIN_TABLE_SIZE, why_dense
from nfdt.model.program.step_effects import StepEffects, trace_step

logger = logging.getLogger(__name__)


def plain_tables(model: Any) -> list[int]:
    """Return the trainable variables, by index, of Keras' own embeddings, whatever else the model does with them."""
    looked_up = {
        id(layer.embeddings)
        for layer in flatten_layers(model)
        if type(layer) is keras.layers.Embedding and layer.embeddings_regularizer is None and not layer.lora_enabled
    }
    return [index for index, variable in enumerate(model.trainable_variables) if id(variable) in looked_up]


def traced_tables(
    model: Any, batch: Any, manifest: Manifest, effects: StepEffects | None, sparse: bool | Literal["lazy"]
) -> Manifest:
    """Return the program with those tables of which a traced step computes the gradient of single rows.

    Large variables of rank 2 are tables if TensorFlow states their gradient as ``tf.IndexedSlices``: every use of them
    in the step is a lookup, whichever class makes it. Smaller ones never travel by rows, and stay as they are.

    Args:
        model: A compiled, built model.
        batch: A batch as ``train_step`` receives it.
        manifest: The program, with :func:`plain_tables`.
        effects: Effects of a step that was traced before, if any.
        sparse: Whether the gradients of tables may travel as rows; lazy: those of Adam as well.
    """
    candidates = _candidates(model)
    rows = sparse and current().has_rows and not manifest.steps_on_workers
    if not candidates or not rows or why_dense(manifest, lazy=sparse == "lazy"):
        return manifest
    try:
        found = effects or trace_step(model, batch)
    except Exception as error:  # fit() will raise it too, if it persists
        logger.debug("No trace of %s for its tables: %s", model.name, error)
        return manifest
    return manifest.replaced(tables=sorted({*manifest.tables} - candidates | candidates & found.by_rows))


def _candidates(model: Any) -> set[int]:
    """Return the trainable variables, by index, that are large enough for rows and may be looked up.

    The kernels of Keras' own layers are not, so that only models with other large matrices are traced.
    """
    kernels = {
        id(variable)
        for layer in flatten_layers(model)
        if is_keras_own(type(layer)) and not isinstance(layer, keras.layers.Embedding)
        for variable in own_variables(layer)
    }
    return {
        index
        for index, variable in enumerate(model.trainable_variables)
        if len(variable.shape) == 2 and math.prod(variable.shape) >= MIN_TABLE_SIZE and id(variable) not in kernels
    }
