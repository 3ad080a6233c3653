"""One synchronous step of a rank on JAX: the gradient of its rows, the sum over all ranks, the user's optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfdt.runtime.rank_step import RankStep, scale_learning_rate
from nfdt.model.backends.contract import PreparedBatch
from nfdt.model.backends.jax_step import JaxGradientStep, joined
from nfdt.model.backends.variables import assign_values
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State

FORMATS = {"identity": jnp.float32, "fp16": jnp.float16, "bf16": jnp.bfloat16}
SMALL = 2**14  # elements of variables whose gradients travel together: a joined vector is a copy


class JaxRankStep(RankStep):
    """Step on JAX: three compiled functions, of which the second is the same on all ranks.

    Each rank sends its gradient times its denominator, and the denominator. Therefore a rank without rows, which does
    not know how the loss is averaged, sends zeros. See :mod:`nfdt.model.backends.denominator`.

    Args:
        model: A compiled, built model; its optimizer is replaced by a recording one.
        manifest: Program of the model.
        state: Initial state.
        add: Sums arrays of shape ``(1, n)`` over all ranks; collective.
        codec: ``identity``, ``fp16`` or ``bf16``.
        scales: Whether :meth:`set_factor` will be called.
    """

    _gradient: JaxGradientStep

    def __init__(
        self,
        model: Any,
        manifest: Manifest,
        state: State,
        add: Callable[[Sequence[Any]], list[Any]],
        codec: str,
        *,
        scales: bool = False,
    ) -> None:
        super().__init__(model, manifest, state)
        self._add, self._format = add, FORMATS[codec]
        small = [index for index, slot in enumerate(self.layout.slots) if slot.size <= SMALL]
        large = [[index] for index, slot in enumerate(self.layout.slots) if slot.size > SMALL]
        self._groups = [*large, small] if small else large
        self._factor = np.float32(1.0)
        self._traced_factor: Any = None
        if scales:
            scale_learning_rate(self.optimizer, self._scaled)
        compiled = model.jit_compile and not model.run_eagerly
        self._compute = jax.jit(self._computed) if compiled else self._computed
        self._apply = jax.jit(self._applied) if compiled else self._applied

    def _replace_optimizer(self, model: Any, loss_scale: Mapping[str, Any] | None) -> None:
        self._gradient = JaxGradientStep(model, self.layout, loss_scale)

    def prepare(self, batch: Any) -> PreparedBatch:
        """Convert a pytree of arrays to tensors on the device, ahead of the call."""
        return self._gradient.prepare(batch)

    def __call__(self, batch: Any, weight: float, pause: Callable[[float], None] | None = None) -> Mapping[str, Any]:
        """Train on this rank's part of a global batch; collective."""
        weights = [variable.value for variable in self._variables]
        logs: Mapping[str, Any] = {}
        if batch is None:
            sent = self._messages([jnp.zeros(slot.shape) for slot in self.layout.slots], jnp.float32(0.0))
        else:
            began = time.perf_counter()
            prepared = batch if isinstance(batch, PreparedBatch) else self.prepare(batch)
            self._gradient.optimizer.iterations.assign(self.optimizer.iterations)
            changing = self._gradient.changing
            held = [variable.value for variable in changing]
            sent, logs, changed = self._compute(weights, held, prepared.pytree, np.float32(weight))
            assign_values(changing, changed)
            if pause is not None:
                jax.block_until_ready(sent)
                pause(time.perf_counter() - began)
        received = self._add(sent)
        if self._variables:
            own = [variable.value for variable in self.optimizer.variables]
            weights, own = self._apply(received, weights, own, self._factor)
            assign_values(self._variables, weights)
            assign_values(self.optimizer.variables, own)
        return dict(logs)

    def _computed(
        self, weights: list[Any], held: list[Any], batch: Any, share: Any
    ) -> tuple[list[Any], dict[str, Any], list[Any]]:
        """Return what this rank sends, the logs of ``train_step``, and ``held`` after the step."""
        gradient, logs, _, changed, counted = self._gradient.pure(weights, held, batch, 1.0 / share)
        weight = 1.0 if self._gradient.sums else share if counted is None else counted
        parts = gradient if isinstance(gradient, list) else self.layout.unflatten(gradient)
        total = jnp.float32(0.0) if counted is None else counted  # shares add up to 1, and sums are not divided
        return self._messages([part * weight for part in parts], total), logs, changed

    def _messages(self, parts: Sequence[Any], denominator: Any) -> list[Any]:
        """Return the arrays that a rank sends, each of shape ``(1, n)``."""
        arrays = [joined([parts[index] for index in group]) for group in self._groups]
        return [*(array.astype(self._format).reshape(1, -1) for array in arrays), denominator.reshape(1, 1)]

    def _parts(self, received: Sequence[Any]) -> list[Any]:
        """Return the gradients by variable, from the sums of :meth:`_messages`."""
        *arrays, denominator = received
        total = jnp.where(denominator[0] > 0, denominator[0], 1.0)
        found: dict[int, Any] = {}
        for group, array in zip(self._groups, arrays, strict=True):
            mean, start = array.astype(jnp.float32) / total, 0
            for index in group:
                slot = self.layout.slots[index]
                found[index] = mean[start : start + slot.size].reshape(slot.shape)
                start += slot.size
        return [found[index] for index in range(len(found))]

    def _applied(
        self, received: Sequence[Any], weights: list[Any], own: list[Any], factor: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return weights and optimizer variables after the update."""
        self._traced_factor = factor
        parts = self._parts(received)
        typed = [part.astype(weight.dtype) for part, weight in zip(parts, weights, strict=True)]
        after = self.optimizer.stateless_apply(own, typed, weights)
        self._traced_factor = None
        if not self._gradient.optimizer.scales:
            return after
        finite = jnp.array([jnp.isfinite(part).all() for part in parts]).all()
        kept: tuple[list[Any], list[Any]] = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), tuple(after), (weights, own)
        )
        return kept

    def _scaled(self, rate: Any) -> Any:
        return rate * (self._factor if self._traced_factor is None else self._traced_factor)

    def set_factor(self, value: float) -> None:
        """Multiply the learning rate by this factor from the next step on."""
        self._factor = np.float32(value)
