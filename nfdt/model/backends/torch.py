"""Keras on PyTorch, which computes each operation at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np
import torch

from nfdt.core.arrays.composite import RaggedArray, SparseArray
from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.backends.contract import (
    GradientResult,
    KerasBackend,
    LocalStep,
    ModelCall,
    PreparedBatch,
    StepName,
    TrainingStep,
    as_tensors,
    check_layout,
    flat_logs,
    own_loss_scale,
    switched,
    unsupported_data,
)
from nfdt.model.backends.denominator import SUM, LossDenominator
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.backends.recording import RecordingOptimizer, StepGradients, next_loss_scale, replace_everywhere
from nfdt.model.backends.variables import preserved
from nfdt.model.keras_internals.models import compiles_torch


class TorchBackend(KerasBackend):
    """PyTorch, on the variables of the model."""

    name = "torch"
    version = str(torch.__version__)
    is_eager = True

    def gradient_step(
        self,
        model: Any,
        layout: ParameterLayout,
        loss_scale: Mapping[str, Any] | None,
        tables: Sequence[int],
        copies: Sequence[Any] = (),
    ) -> TrainingStep:
        """Return a step that works on the model's variables."""
        return TorchGradientStep(model, layout, loss_scale)

    def local_step(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> LocalStep:
        """Return a step that works on the model's variables."""
        return TorchLocalStep(model, layout, progress)

    def call(self, model: Any, layout: ParameterLayout, method: str) -> ModelCall:
        """Return a step that works on the model's variables."""
        check_layout(model, layout)
        run = _compiled(getattr(model, method), model)

        def call(weights: Any, batch: Any) -> Any:
            _assign(weights, model, layout)
            with torch.no_grad():
                found = run(as_tensors(batch))
                return flat_logs(found, method, _as_log) if method == "test_step" else list(keras.tree.flatten(found))

        return call

    def to_tensor(self, leaf: Any) -> Any:
        """Return an array as a ``torch.Tensor`` on the device of Keras, with its own copy of the elements.

        Raises:
            CaptureError: the array is sparse or ragged, or consists of texts.
        """
        if isinstance(leaf, RaggedArray | SparseArray) or np.asarray(leaf).dtype.kind in "OSU":
            raise unsupported_data(leaf, "dense", "PyTorch")
        return keras.ops.convert_to_tensor(np.array(leaf))

    def run_step(self, model: Any, step: StepName, batch: Any) -> Any:
        """Call a step, which works on the model's variables."""
        with torch.set_grad_enabled(step == "train_step"):
            return getattr(model, step)(batch)

    def trace(self, model: Any, step: StepName, batch: Any) -> None:
        """Run a step, and restore the variables that existed before."""
        with preserved(list(model.variables)):
            self.run_step(model, step, batch)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed PyTorch's generators."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield

    def full_precision(self) -> AbstractContextManager[None]:
        """Disable TensorFloat-32."""
        return switched("highest", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)

    def reduce(self, obj: Any) -> tuple[Any, ...] | None:
        """Return the form of a tensor: its elements on the host."""
        return (_make_tensor, (obj.detach().cpu().numpy(),)) if type(obj) is torch.Tensor else None

    def seed_worker(self, worker: int) -> None:
        """Seed PyTorch's generator, from which dropout draws."""
        torch.manual_seed(worker)

    def limit_threads(self, threads: int) -> None:
        """Limit the threads of operations."""
        torch.set_num_threads(threads)


class TorchGradientStep(TrainingStep):
    """One training step of a model on PyTorch, compiled where the model asks for it.

    The model's optimizer is permanently replaced by one that records gradients; the step assigns the weights.

    Args:
        model: A compiled, built model.
        layout: Layout of its trainable variables.
        loss_scale: The program's ``loss_scale``; None takes it from the model's own LossScaleOptimizer.
    """

    def __init__(self, model: Any, layout: ParameterLayout, loss_scale: Mapping[str, Any] | None) -> None:
        check_layout(model, layout)
        self.model, self._layout = model, layout
        self._optimizer = TorchRecordingOptimizer(
            model.optimizer, model.trainable_variables, layout, loss_scale or own_loss_scale(model.optimizer)
        )
        replace_everywhere(model, self._optimizer)
        self._version = int(self._optimizer.iterations)
        self._denominator = LossDenominator(model)
        self._run = _compiled(model.train_step, model)

    def _compute(self, weights: Any, batch: PreparedBatch, version: int, share: float) -> GradientResult:
        _assign(weights, self.model, self._layout)
        return self.on_present_weights(batch, version, share)

    def on_present_weights(self, batch: PreparedBatch, version: int, share: float) -> GradientResult:
        """Compute a gradient on the weights that the model has."""
        self._optimizer.begin_step(version)
        self._denominator.begin_step(1.0 / share)
        logs = flat_logs(self._run(batch.pytree), "train_step", _as_log)
        gradient, finite = self._optimizer.gradients.collect()
        denominator = self._denominator.end_step()
        if denominator is SUM:
            gradient *= np.float32(share)
        return GradientResult(gradient, logs, finite, denominator)


class TorchLocalStep(LocalStep):
    """Step with the model's own optimizer, compiled where the model asks for it."""

    def __init__(self, model: Any, layout: ParameterLayout, progress: JobProgress) -> None:
        super().__init__(model, layout, progress)
        self._run = _compiled(model.train_step, model)

    def train(self, batch: Any, position: int | None) -> dict[str, Any]:
        """Train on a prepared batch; see :class:`LocalStep`."""
        self.progress.position = position
        return flat_logs(self._run(batch.pytree), "train_step", _as_log)


class TorchRecordingOptimizer(RecordingOptimizer):
    """Replacement of the model's optimizer while a worker computes gradients with PyTorch.

    Args:
        replaced: The model's optimizer.
        variables: The trainable variables, in the layout's order.
        layout: Position of each variable in the flat vector.
        loss_scale: Dynamic scale of the loss, ``{"initial_scale", "dynamic_growth_steps"}``; None: a fixed one.
    """

    gradients: _EagerGradients

    def __init__(
        self, replaced: Any, variables: Sequence[Any], layout: ParameterLayout, loss_scale: Mapping[str, Any] | None
    ) -> None:
        fixed = {"initial_scale": replaced.loss_scale_factor or 1.0, "dynamic_growth_steps": 0}
        super().__init__(replaced, variables, _EagerGradients(layout, loss_scale or fixed))

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss, scaled as by the replaced optimizer."""
        return loss * self.gradients.scale if self.gradients.scale != 1.0 else loss


class _EagerGradients(StepGradients):
    """The gradients of one step, and their scale; it is dynamic if ``dynamic_growth_steps`` is not 0."""

    def __init__(self, layout: ParameterLayout, scaling: Mapping[str, Any]) -> None:
        super().__init__(layout)
        self.scale = float(scaling["initial_scale"])
        self._growth_steps = int(scaling["dynamic_growth_steps"])
        self._finite_steps = 0

    def collect(self) -> tuple[Any, bool]:
        """Return the step's flat, unscaled float32 gradient on the host, shape ``(P,)``, and whether it is finite.

        A dynamic scale is updated.

        Raises:
            CaptureError: no gradient was recorded.
        """
        self.require_any()
        flat = np.zeros(self.layout.size, np.float32)
        for place, gradient in self.recorded.items():
            slot = self.layout.slots[place]
            torch.from_numpy(flat[slot.start : slot.stop]).copy_(gradient.detach().reshape(-1))
        if self.scale != 1.0:
            flat /= np.float32(self.scale)
        if not self._growth_steps:
            return flat, True
        finite = np.isfinite(flat).all()
        scale, steps = next_loss_scale(self.scale, self._finite_steps, finite, self._growth_steps, np.where)
        self.scale, self._finite_steps = float(scale), int(steps)
        return flat, bool(finite)


def _compiled(step: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Wrap a step as Keras would run it for this model."""
    return torch.compile(step) if compiles_torch(model) else step


def _assign(weights: Any, model: Any, layout: ParameterLayout) -> None:
    """Copy flat weights to the trainable variables."""
    flat = torch.from_numpy(np.require(weights, requirements=["W"]))  # of read-only memory PyTorch warns
    with torch.no_grad():
        for slot, variable in zip(layout.slots, model.trainable_variables, strict=True):
            variable.value.copy_(flat[slot.start : slot.stop].reshape(slot.shape))


def _as_log(_: str, value: Any) -> Any:
    array = keras.ops.convert_to_numpy(value)
    return array.astype(np.float32) if array.ndim == 0 else array


def _make_tensor(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value)


BACKEND = TorchBackend()
