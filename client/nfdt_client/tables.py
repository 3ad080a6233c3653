"""Tables that shards make and hold: what a fit with them cannot have, and where a server keeps them after it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import keras

from nfdt.core.errors import UsageError
from nfdt.model.backends.embedding import Embedding, StoredRows, stored_rows
from nfdt.model.backends.lookups import layer_of
from nfdt.model.keras_internals.models import has_no_rows
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.optimizer import inner_optimizer
from nfdt_client import callbacks

__all__ = ["Embedding", "check_fit", "has_tables", "optimizer_of", "remember"]

logger = logging.getLogger(__name__)


def has_tables(model: Any) -> bool:
    """Return whether a model has tables that are on the shards only."""
    return any(has_no_rows(variable) for variable in model.trainable_variables)


def check_fit(manifest: Manifest, listeners: Any, *, validates_here: bool) -> None:
    """Check that a fit needs no tables in this process, and log a warning for callbacks that see the model without.

    Args:
        manifest: The program.
        listeners: The callbacks.
        validates_here: Whether this process validates.

    Raises:
        UsageError: it does.
    """
    if not manifest.made:
        return
    if validates_here:
        raise UsageError(
            "nfdt.Embedding: expected validation data that workers can read, or that are arrays, and a test_step that "
            "returns metrics. Received: a validation in this process, which has no rows. Pass arrays."
        )
    for callback in callbacks.each(listeners):
        name = type(callback).__name__
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.restore_best_weights:
            raise UsageError(
                f"{name}: expected restore_best_weights=False, as tables of nfdt.Embedding stay on the shards and "
                "cannot be put back. Received: True. Leave it out."
            )
        if callbacks.contents_for([callback]) is not None:
            logger.warning("%s sees the model without the tables of nfdt.Embedding, and stores it so.", name)


def optimizer_of(model: Any) -> Callable[[], Any]:
    """Return a function that returns the optimizer of a model as long as it exists; None if there is none."""
    return (lambda: None) if model.optimizer is None else weakref.ref(inner_optimizer(model))


def remember(model: Any, manifest: Manifest, server: str, state: str) -> None:
    """Record where a server keeps the tables of a model: in the state, an artifact, that its last fit has made."""
    owners = manifest.optimizer_owners or ()
    for index in manifest.made:
        slots = tuple(slot for slot, owner in enumerate(owners) if owner == index)
        start = manifest.layout.slots[index].start
        stored_rows[layer_of(model, index)] = StoredRows(server, state, start, slots, optimizer_of(model))
