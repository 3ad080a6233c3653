"""Gradients of several workers on JAX in one call: :meth:`JaxGradientStep.pure` under ``jax.vmap``.

A lane is one worker's gradient. It has weights, untrained variables and a batch of its own, and counts in metrics that
were just reset. What it has counted is added to the model's metrics later, when its worker has finished the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from nfdt.core.arrays.layout import Array, RowSelection
from nfdt.core.backends.contract import as_tensors
from nfdt.core.backends.denominator import SUM
from nfdt.core.backends.jax_step import JaxGradientStep, as_log
from nfdt.core.backends.lanes import GradientLane, LaneBatch, LaneResult
from nfdt.core.backends.step_result import flat_logs

HELD_BYTES = 2**32
"""Most bytes of training data that are kept on the device: a tenth of the memory of an accelerator of 40 GB."""


class JaxBatchedStep:
    """Step of several lanes: one function, compiled once per signature of the batch and number of lanes.

    Creating it resets the model's metrics.

    Args:
        step: Step of one gradient, of a model whose gradients can be computed together.
    """

    def __init__(self, step: JaxGradientStep) -> None:
        self._step, self._model = step, step.model
        self._iterations, self._rate = step.optimizer.variables
        self._metrics = list(self._model.metrics_variables)
        self._untrained = len(self._model.non_trainable_variables)
        self._model.reset_metrics()
        self._reset = [np.array(variable.value) for variable in self._metrics]
        self._arrays: Any = None
        self._run = jax.jit(jax.vmap(self._lane, in_axes=(0, 0, 0, 0, 0, None)))
        self._added = jax.jit(self._add)

    # ---- batches

    def hold(self, pytree: Any) -> bool:
        """Put the arrays of the training data on the device, if :meth:`rows` can take batches from them there."""
        leaves = _leaves(pytree)
        if not _are_numbers(leaves) or sum(leaf.nbytes for leaf in leaves) > HELD_BYTES:
            return False
        self._arrays = as_tensors(pytree)
        return True

    @staticmethod
    def rows(rows: RowSelection) -> LaneBatch:
        """Return the batch of these rows of the arrays on the device."""
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
        return LaneBatch(("rows", len(numbers)), numbers.astype(np.int32), from_device=True)

    @staticmethod
    def batch(pytree: Any) -> LaneBatch | None:
        """Return a batch of arrays on the host; None if they cannot be stacked."""
        leaves, structure = jax.tree.flatten(pytree)
        if not _are_numbers(leaves):
            return None
        return LaneBatch((structure, *((leaf.shape, leaf.dtype) for leaf in leaves)), pytree, from_device=False)

    # ---- steps

    def __call__(self, lanes: Sequence[GradientLane]) -> list[LaneResult]:
        """Compute the gradients of lanes whose batches have one signature; a lane may occur several times.

        Raises:
            Exception: any exception of the user's code, and those of JAX for code that has no vectorised form.
        """
        iterations = np.asarray([lane.version for lane in lanes], self._iterations.value.dtype)
        args = (
            np.stack([lane.weights for lane in lanes]),
            _stacked([lane.state for lane in lanes]),
            iterations,
            np.asarray([1.0 / lane.shares[0] for lane in lanes], np.float32),
            _stacked([lane.batches[0].content for lane in lanes]),
            self._arrays if lanes[0].batches[0].from_device else None,
        )
        gradients, states, counts, totals = jax.device_get(self._run(*args))
        return [
            LaneResult(
                gradients[i],
                [state[i, ...] for state in states],
                [count[i, ...] for count in counts],
                SUM if self._step.sums else None if totals is None else totals[i],
            )
            for i in range(len(lanes))
        ]

    def count(self, counted: Sequence[Array]) -> dict[str, Any]:
        """Add what a lane has counted to the model's metrics; return their results, the logs of a step."""
        values, logs = self._added([variable.value for variable in self._metrics], list(counted))
        for variable, value in zip(self._metrics, values, strict=True):
            variable.assign(value)
        return dict(logs)

    def _lane(self, weights: Any, untrained: list[Any], iterations: Any, factor: Any, batch: Any, arrays: Any) -> Any:
        if arrays is not None:
            batch = jax.tree.map(lambda array: array[batch], arrays)
        held = [*untrained, *self._reset, iterations, self._rate.value]
        gradient, _, _, changed, denominator = self._step.pure(weights, held, batch, factor)
        metrics = changed[self._untrained : self._untrained + len(self._reset)]
        counted = [value - reset for value, reset in zip(metrics, self._reset, strict=True)]
        vector = jax.numpy.concatenate(gradient) if isinstance(gradient, list) else gradient
        return vector, changed[: self._untrained], counted, denominator

    def _add(self, held: list[Any], counted: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        values = [value + more for value, more in zip(held, counted, strict=True)]
        with keras.StatelessScope(state_mapping=zip(self._metrics, values, strict=True)):
            return values, flat_logs(self._model.get_metrics_result(), "train_step", as_log)


def _leaves(pytree: Any) -> list[Any]:
    return list(jax.tree.leaves(pytree))


def _are_numbers(leaves: Sequence[Any]) -> bool:
    return bool(leaves) and all(isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" for leaf in leaves)


def _stacked(pytrees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *pytrees)
