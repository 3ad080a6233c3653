"""The embedding tables of a model: its variables whose gradients are of the rows that a batch looked up."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import keras

from nfdt.core.arrays.table_rows import MIN_TABLE_SIZE
from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import current
from nfdt.model.backends.embedding import LOOKUPS, stored_rows
from nfdt.model.keras_internals.models import flatten_layers, has_no_rows, own_variables
from nfdt.model.program.collect import is_keras_own
from nfdt.model.program.manifest import MadeTable, Manifest
from nfdt.model.program.optimizer import inner_optimizer
from nfdt.model.program.row_updates import why_dense
from nfdt.model.program.step_effects import StepEffects, trace_step

logger = logging.getLogger(__name__)


def plain_tables(model: Any) -> list[int]:
    """Return the trainable variables, by index, of embeddings of Keras and NFDT, whatever else the model does."""
    looked_up = {
        id(layer.embeddings)
        for layer in flatten_layers(model)
        if type(layer) in LOOKUPS and layer.embeddings_regularizer is None and not layer.lora_enabled
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


def made_tables(model: Any, optimizer_owners: Sequence[int] | None) -> dict[str, Any]:
    """Return the entry ``made`` of a program: the tables, by index, that are on the shards only.

    Args:
        model: A built model.
        optimizer_owners: Trainable variable to which each variable of its optimizer belongs, if that is known.

    Raises:
        CaptureError: a table on the shards is not trainable.
    """
    for variable in model.non_trainable_variables:
        if has_no_rows(variable):
            raise CaptureError(
                f"Variable {variable.path!r}: expected a trainable table, as its rows are on the shards. Received: a "
                "frozen one. Leave the layer trainable."
            )
    found = {}
    for index, variable in enumerate(model.trainable_variables):
        if has_no_rows(variable):
            layer = next(one for one in flatten_layers(model) if getattr(one, "_embeddings", None) is variable)
            table = MadeTable(layer.seeded_rows)
            if (stored := stored_rows.get(layer)) is not None:
                known = stored.optimizer() is inner_optimizer(model)
                own = [slot for slot, owner in enumerate(optimizer_owners or ()) if owner == index] if known else []
                slots = dict(zip(own, stored.slots, strict=True)) if len(own) == len(stored.slots) else {}
                table = replace(table, state=stored.state, start=stored.start, slots=slots)
            found[str(index)] = table.to_json()
    return found


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
