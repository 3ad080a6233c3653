"""Keras on PyTorch, which computes each operation at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import torch

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.backends.contract import StepName
from nfdt.core.errors import CaptureError


class TorchOperations:
    """Operations of PyTorch; see :class:`~nfdt.core.backends.contract.BackendOperations`."""

    name = "torch"
    version = str(torch.__version__)

    def to_tensor(self, leaf: Any) -> Any:
        """Return an array as a ``torch.Tensor`` on the device of Keras, with its own copy of the elements.

        Raises:
            CaptureError: the array is sparse or ragged, or consists of texts.
        """
        if isinstance(leaf, RaggedArray | SparseArray) or np.asarray(leaf).dtype.kind in "OSU":
            kind = {RaggedArray: "a ragged array", SparseArray: "a sparse array"}.get(type(leaf), "an array of texts")
            raise CaptureError(
                "Training data: expected numbers in dense arrays, as Keras on PyTorch has them. "
                f"Received: {kind}. Convert it before fit(), or set KERAS_BACKEND=tensorflow."
            )
        return keras.ops.convert_to_tensor(np.array(leaf))

    def run_step(self, model: Any, step: StepName, batch: Any) -> Any:
        """Call a step, which works on the model's variables."""
        with torch.set_grad_enabled(step == "train_step"):
            return getattr(model, step)(batch)

    def trace(self, model: Any, step: StepName, batch: Any) -> None:
        """Run a step, and restore the variables that existed before."""
        variables = list(model.variables)
        held = [variable.numpy() for variable in variables]
        self.run_step(model, step, batch)
        for variable, value in zip(variables, held, strict=True):
            variable.assign(value)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Do nothing: there are no graphs."""
        yield

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed PyTorch's generators."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Disable TensorFloat-32."""
        allowed = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(allowed)

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the form of a tensor: its elements on the host."""
        return (_make_tensor, (obj.detach().cpu().numpy(),)) if type(obj) is torch.Tensor else None

    def blank(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return a tensor of zeros."""
        return keras.ops.zeros(shape, dtype)


def _make_tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


OPERATIONS = TorchOperations()
