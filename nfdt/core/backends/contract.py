"""Contract of a backend, and the choice of the one that Keras has loaded."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Literal, Protocol

MODULES = {name: f"nfdt.core.backends.{name}" for name in ("tensorflow", "jax", "torch")}

StepName = Literal["train_step", "test_step", "predict_step"]


class BackendOperations(Protocol):
    """Operations that Keras does not offer on all backends under one name.

    Attributes:
        name: Name of the backend in Keras.
        version: Version of its library.
    """

    name: str
    version: str

    def to_tensor(self, leaf: Any) -> Any:
        """Return an array, dense, sparse or ragged, as the tensor that the model's own steps expect."""

    def run_step(self, model: Any, step: StepName, batch: Any) -> Any:
        """Call a step of the model with a batch of tensors, and return its logs, or the outputs.

        The caller restores the model's variables.
        """

    def trace(self, model: Any, step: StepName, batch: Any) -> None:
        """Trace a step of the model for a batch of tensors, as ``fit`` would."""

    def without_graphs(self) -> AbstractContextManager[None]:
        """Run in the block each operation at once, with its value."""

    def seeded(self, seed: int) -> AbstractContextManager[None]:
        """Seed the backend's own generators in the block, and restore them."""

    def full_precision(self) -> AbstractContextManager[None]:
        """Compute products of float32 with all their bits in the block, also on accelerators."""

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """Return function and arguments that make an object of the backend again in another process.

        None where the object is none of the backend, or pickles well by itself.
        """

    def blank(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a tensor of zeros."""


def current() -> BackendOperations:
    """Return the backend that Keras has loaded."""
    import keras

    return _load(keras.backend.backend())


@cache
def _load(name: str) -> BackendOperations:
    backend: BackendOperations = importlib.import_module(MODULES[name]).OPERATIONS
    return backend


def to_tensor(leaf: Any) -> Any:
    """Return an array, dense, sparse or ragged, as a tensor of Keras' backend."""
    return current().to_tensor(leaf)


def as_tensors(batch: Any) -> Any:
    """Return the pytree with tensors at its leaves, as the model's own steps expect them; None stays None."""
    import keras

    return keras.tree.map_structure(lambda leaf: None if leaf is None else to_tensor(leaf), batch)
