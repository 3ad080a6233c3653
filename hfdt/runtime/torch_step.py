"""One synchronous step of a rank on PyTorch: the gradient of its rows, the sum over all ranks, the user's optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import torch

from hfdt.runtime.rank_step import RankStep, scale_learning_rate
from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.model.backends.contract import PreparedBatch
from nfdt.model.backends.denominator import SUM
from nfdt.model.backends.torch import TorchGradientStep
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

FORMATS = {"identity": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class TorchRankStep(RankStep):
    """Step on PyTorch, on the model's variables.

    Each rank sends its gradient times its denominator, and the denominator. Therefore a rank without rows, which does
    not know how the loss is averaged, sends zeros. See :mod:`nfdt.model.backends.denominator`.

    Args:
        model: A compiled, built model; its optimizer is replaced by a recording one.
        manifest: Program of the model.
        state: Initial state.
        add: Sums vectors over all ranks, which travel as numbers of a type; collective.
        codec: ``identity``, ``fp16`` or ``bf16``.
        scales: Whether :meth:`set_factor` will be called.
    """

    _gradient: TorchGradientStep

    def __init__(
        self,
        model: Any,
        manifest: Manifest,
        state: State,
        add: Callable[..., Array],
        codec: str,
        *,
        scales: bool = False,
    ) -> None:
        super().__init__(model, manifest, state)
        self._add, self._format, self._factor = add, FORMATS[codec], 1.0
        if scales:
            scale_learning_rate(self.optimizer, lambda rate: rate * self._factor)

    def _replace_optimizer(self, model: Any, loss_scale: Mapping[str, Any] | None) -> None:
        self._gradient, self._skips = TorchGradientStep(model, self.layout, loss_scale), loss_scale is not None

    def prepare(self, batch: Any) -> PreparedBatch:
        """Convert a pytree of arrays to tensors on the device, ahead of the call."""
        return self._gradient.prepare(batch)

    def __call__(self, batch: Any, weight: float, pause: Callable[[float], None] | None = None) -> Mapping[str, Any]:
        """Train on this rank's part of a global batch; collective."""
        own, total, logs = np.zeros(self.layout.size, np.float32), 0.0, dict[str, Any]()
        if batch is not None:
            began = time.perf_counter()
            prepared = batch if isinstance(batch, PreparedBatch) else self.prepare(batch)
            result = self._gradient.on_present_weights(prepared, int(self.optimizer.iterations), weight)
            own, logs = result.gradient, dict(result.logs)
            if result.denominator is None:
                own *= np.float32(weight)  # shares add up to 1
            elif result.denominator is not SUM:
                total = float(result.denominator)
                own *= np.float32(total)
            if pause is not None:
                pause(time.perf_counter() - began)
        summed = self._add(own, self._format)
        denominator = float(self._add(np.array([total], np.float32))[0])
        if denominator > 0:
            summed /= np.float32(denominator)
        if self._variables and not (self._skips and not np.isfinite(summed).all()):
            self.optimizer.apply(self._parts(summed), self._variables)
        return logs

    def _parts(self, gradient: Array) -> list[torch.Tensor]:
        """Return the gradients by variable, on their devices."""
        pairs = zip(self.layout.unflatten(gradient), self._variables, strict=True)
        return [torch.from_numpy(part).to(variable.value) for part, variable in pairs]

    def set_factor(self, value: float) -> None:
        """Multiply the learning rate by this factor from the next step on."""
        self._factor = value

    def weights(self) -> Array:
        """Return a copy of the trainable variables, flat, float32."""
        return flat_weights(self._variables, self.layout)

    def read(self) -> State:
        """Return a copy of weights and optimizer variables."""
        variables = {i: np.array(keras.ops.convert_to_numpy(v)) for i, v in enumerate(self.optimizer.variables)}
        return State(self.weights(), optimizer=variables)


def flat_weights(variables: Sequence[Any], layout: ParameterLayout) -> Array:
    """Return a copy of variables, flat, float32."""
    return layout.flatten([keras.ops.convert_to_numpy(variable) for variable in variables])
