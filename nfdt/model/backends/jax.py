"""Keras on JAX, whose steps are functions of the model's state."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np
from jax.experimental.sparse import BCOO

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.layout import Array, ParameterLayout, RowSelection
from nfdt.model.backends.contract import (
    KerasBackend,
    LocalStep,
    ModelCall,
    StepName,
    TrainingStep,
    as_tensors,
    flat_logs,
    unsupported_data,
)
from nfdt.model.backends.denominator import SUM
from nfdt.model.backends.jax_devices import ShippedLayouts, distributed
from nfdt.model.backends.jax_step import CompiledFunction, JaxGradientStep, JaxLocalStep, as_log, joined, model_call
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.backends.lanes import BatchedStep, GradientLane, LaneBatch, LaneResult
from nfdt.model.backends.mesh import Mesh
from nfdt.model.backends.variables import assign_values

HELD_BYTES = 2**32
"""Limit of training data kept on the device, in bytes: a tenth of the memory of an accelerator with 40 GB."""

LANES = 32
"""Limit of gradients in one call, as each needs memory for activations: estimated for ResNet-20 with batches of 128."""


class JaxBackend(KerasBackend):
    """JAX, which computes gradients by pure functions of the whole state of a model."""

    name = "jax"
    version = str(jax.__version__)
    has_meshes = True

    def gradient_step(
        self,
        model: Any,
        layout: ParameterLayout,
        loss_scale: Mapping[str, Any] | None,
        tables: Sequence[int],
        copies: Sequence[Any] = (),
    ) -> TrainingStep:
        """Return a step that is a function of the whole state."""
        return JaxGradientStep(model, layout, loss_scale)

    def local_step(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> LocalStep:
        """Return a step that is a function of the whole state."""
        return JaxLocalStep(model, layout, progress)

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
            raise unsupported_data(leaf, "dense or sparse", "JAX")
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

    def without_graphs(self) -> AbstractContextManager[None]:
        """Run functions of ``jax.jit`` as Python in the block."""
        return jax.disable_jit()

    def emulate_devices(self, count: int) -> None:
        """Divide the processor, unless JAX has computed already."""
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)

    def devices(self) -> list[str]:
        """Return the devices of this process on its default platform."""
        return [f"{device.platform}:{device.id}" for device in jax.local_devices()]

    def distributed(self, devices: Sequence[str], mesh: Mesh | None) -> AbstractContextManager[None]:
        """Set Keras' DataParallel, or the script's ModelParallel."""
        return distributed(devices, mesh)

    def settle(self, model: Any) -> None:
        """Give the variables the layouts of the script's."""
        if isinstance(distribution := keras.distribution.distribution(), ShippedLayouts):
            distribution.settle(model.variables)

    def full_precision(self) -> AbstractContextManager[None]:
        """Choose the highest precision of products."""
        return jax.default_matmul_precision("highest")


def _state_of(model: Any, step: StepName) -> tuple[list[Any], ...]:
    """Return the state that a step takes."""
    return tuple([variable.value for variable in group] for group in _variables_of(model, step))


def _variables_of(model: Any, step: StepName) -> list[list[Any]]:
    groups = [model.trainable_variables, model.non_trainable_variables]
    if step == "train_step":
        groups.append(model.optimizer.variables)
    return groups if step == "predict_step" else [*groups, model.metrics_variables]


class JaxBatchedStep:
    """Step of several lanes: :meth:`JaxGradientStep.pure` under ``jax.vmap``.

    It is compiled once per signature of the batch and number of lanes. A lane is one worker's gradient. It has weights,
    untrained variables and a batch of its own, and counts in metrics that were just reset. What it has counted is added
    to the model's metrics later, when its worker has finished the step. Creating the step resets the metrics.

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
        self._run = CompiledFunction(jax.vmap(self._lane, in_axes=(0, 0, 0, 0, 0, None)))
        self._added = jax.jit(self._add)

    # ---- batches

    def hold(self, pytree: Any) -> bool:
        """Put the arrays of the training data on the device, if :meth:`rows` can take batches from them there."""
        leaves = jax.tree.leaves(pytree)
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
        assign_values(self._metrics, values)
        return dict(logs)

    def _lane(self, weights: Any, untrained: list[Any], iterations: Any, factor: Any, batch: Any, arrays: Any) -> Any:
        if arrays is not None:
            batch = jax.tree.map(lambda array: array[batch], arrays)
        held = [*untrained, *self._reset, iterations, self._rate.value]
        gradient, _, _, changed, denominator = self._step.pure(weights, held, batch, factor)
        metrics = changed[self._untrained : self._untrained + len(self._reset)]
        counted = [value - reset for value, reset in zip(metrics, self._reset, strict=True)]
        vector = joined(gradient) if isinstance(gradient, list) else gradient
        return vector, changed[: self._untrained], counted, denominator

    def _add(self, held: list[Any], counted: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        values = [value + more for value, more in zip(held, counted, strict=True)]
        with keras.StatelessScope(state_mapping=zip(self._metrics, values, strict=True)):
            return values, flat_logs(self._model.get_metrics_result(), "train_step", as_log)


def _are_numbers(leaves: Sequence[Any]) -> bool:
    return bool(leaves) and all(isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" for leaf in leaves)


def _stacked(pytrees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *pytrees)


BACKEND = JaxBackend()
