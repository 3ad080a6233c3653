"""Keras on JAX, whose steps are functions of the model's state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import BCOO

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.backends.contract import KerasBackend, ModelCall, StepName, TrainingStep
from nfdt.core.backends.jax_batched_step import JaxBatchedStep
from nfdt.core.backends.jax_step import JaxGradientStep, model_call
from nfdt.core.backends.lanes import BatchedStep
from nfdt.core.errors import CaptureError

LANES = 32
"""Most gradients of one call, as each needs its own activations; an estimate for ResNet-20 with batches of 128."""


class JaxBackend(KerasBackend):
    """JAX; see :class:`~nfdt.core.backends.contract.KerasBackend`."""

    name = "jax"
    version = str(jax.__version__)

    def gradient_step(
        self, model: Any, layout: ParameterLayout, loss_scale: Mapping[str, Any] | None, tables: Sequence[int]
    ) -> TrainingStep:
        """Return a step that is a function of the whole state."""
        return JaxGradientStep(model, layout, loss_scale)

    def call(self, model: Any, layout: ParameterLayout, method: str) -> ModelCall:
        """Return a step as a function of the whole state."""
        return model_call(model, layout, method)

    @property
    def lanes(self) -> int:
        """Number of gradients of one call.

        More than one is faster on accelerators only: on CPUs a convolution with other weights in each lane is slower
        than one after the other.
        """
        return 1 if jax.default_backend() == "cpu" else LANES

    def batched_step(self, step: TrainingStep) -> BatchedStep | None:
        """Return the step under ``jax.vmap``, unless it is not compiled, or changes a loss scale in each step."""
        compiled = step.model.jit_compile and not step.model.run_eagerly
        if not isinstance(step, JaxGradientStep) or not compiled or step.optimizer.scales:
            return None
        return JaxBatchedStep(step)

    def to_tensor(self, leaf: Any) -> Any:
        """Return an array as a ``jax.Array`` or ``BCOO``, with its own copy of the elements.

        Raises:
            CaptureError: the array is ragged or consists of texts, which JAX does not have.
        """
        if isinstance(leaf, SparseArray):
            return BCOO((jax.numpy.array(leaf.values), jax.numpy.array(leaf.indices)), shape=tuple(leaf.shape))
        if isinstance(leaf, RaggedArray) or np.asarray(leaf).dtype.kind in "OSU":
            kind = "a ragged array" if isinstance(leaf, RaggedArray) else "an array of texts"
            raise CaptureError(
                f"Training data: expected numbers in dense or sparse arrays, as Keras on JAX has them. "
                f"Received: {kind}. Convert it before fit(), or set KERAS_BACKEND=tensorflow."
            )
        return jax.numpy.array(leaf)

    def run_step(self, model: Any, step: StepName, batch: Any) -> Any:
        """Call a step with the values of the model's variables, and assign those that it returns."""
        result, state = getattr(model, step)(_state_of(model, step), batch)
        if step == "predict_step":  # it returns the untrained ones alone
            state = ([], state)
        for group, values in zip(_variables_of(model, step), state, strict=True):
            for variable, value in zip(group, values, strict=False):
                variable.assign(value)
        return result

    def trace(self, model: Any, step: StepName, batch: Any) -> None:
        """Compute the shapes of a step; an eager model runs it."""
        if model.run_eagerly:
            self.run_step(model, step, batch)
        else:
            jax.eval_shape(getattr(model, step), _state_of(model, step), batch)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Run functions of ``jax.jit`` as Python in the block."""
        with jax.disable_jit():
            yield

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Choose the highest precision of products."""
        with jax.default_matmul_precision("highest"):
            yield

    def blank(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an array of zeros."""
        return jax.numpy.zeros(shape, dtype)


def _state_of(model: Any, step: StepName) -> tuple[list[Any], ...]:
    """Return the state that a step takes."""
    return tuple([variable.value for variable in group] for group in _variables_of(model, step))


def _variables_of(model: Any, step: StepName) -> list[list[Any]]:
    groups = [model.trainable_variables, model.non_trainable_variables]
    if step == "train_step":
        groups.append(model.optimizer.variables)
    return groups if step == "predict_step" else [*groups, model.metrics_variables]


BACKEND = JaxBackend()
