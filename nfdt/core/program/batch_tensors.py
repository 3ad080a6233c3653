"""Batches of arrays as tensors of Keras' backend: dense, sparse or ragged, as the model's own steps expect them."""

from __future__ import annotations

from typing import Any

import keras

from nfdt.core.backends.contract import current


def to_tensor(leaf: Any) -> Any:
    """Return an array as a tensor."""
    return current().to_tensor(leaf)


def as_tensors(batch: Any) -> Any:
    """Return the pytree with tensors at its leaves; None stays None."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else to_tensor(leaf), batch)
