"""Steps of Keras' optimizers on some rows of a table, in NumPy, with Keras' order of operations.

Rows without a gradient keep their values and their slots, the optimizer's variables of the table. With gradient descent
and Adagrad that is Keras itself, whose step of such a row is zero. Adam becomes lazy.

References:
    TensorFlow Addons, ``tfa.optimizers.LazyAdam``: the moments of touched rows only; bias corrections by all updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from nfdt.model.program.manifest import Manifest

Vector = npt.NDArray[np.float32]
Slots = tuple[Vector, ...]


class RowOptimizer:
    """Gradient descent, without slots.

    Args:
        options: Options of Keras' optimizer.

    Attributes:
        initial: Initial value of each slot.
    """

    initial: tuple[float, ...] = ()

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def step(
        self, gradient: Vector, rows: Vector, slots: Slots, rate: np.float32, updates: int
    ) -> tuple[Vector, Slots]:
        """Return rows and slots after a step; all arrays have the shape ``(k, width)``.

        Args:
            gradient: Gradient of the rows.
            rows: Weights of the rows.
            slots: The optimizer's variables of the rows, in its own order.
            rate: Learning rate.
            updates: Number of updates that the optimizer applied before.
        """
        return rows - rate * gradient, ()


class RowAdagrad(RowOptimizer):
    """``keras.optimizers.Adagrad``; its slot is the sum of squared gradients."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.initial = (float(options["initial_accumulator_value"]),)
        self._epsilon = np.float32(options["epsilon"])

    def step(
        self, gradient: Vector, rows: Vector, slots: Slots, rate: np.float32, updates: int
    ) -> tuple[Vector, Slots]:
        """Return rows and slots after a step; see :class:`RowOptimizer`."""
        total = slots[0] + gradient * gradient
        length: Vector = np.sqrt(total + self._epsilon)
        return rows - (rate * gradient) / length, (total,)


class RowAdam(RowOptimizer):
    """``keras.optimizers.Adam`` without amsgrad and weight decay, lazy; its slots are both moments."""

    initial = (0.0, 0.0)

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._betas = np.float32(options["beta_1"]), np.float32(options["beta_2"])
        self._epsilon = np.float32(options["epsilon"])

    def step(
        self, gradient: Vector, rows: Vector, slots: Slots, rate: np.float32, updates: int
    ) -> tuple[Vector, Slots]:
        """Return rows and slots after a step; see :class:`RowOptimizer`."""
        one, (beta_1, beta_2) = np.float32(1), self._betas
        power_1, power_2 = (np.power(beta, np.float32(updates + 1)) for beta in self._betas)
        first = slots[0] + (gradient - slots[0]) * (one - beta_1)
        second = slots[1] + (gradient * gradient - slots[1]) * (one - beta_2)
        alpha = rate * np.sqrt(one - power_2) / (one - power_1)
        return rows - first * alpha / (np.sqrt(second) + self._epsilon), (first, second)


_OPTIMIZERS: dict[str | None, type[RowOptimizer]] = {
    "SGD": RowOptimizer,
    "Adagrad": RowAdagrad,
    "Adam": RowAdam,
    "AdamW": RowAdam,
}


def row_optimizer(manifest: Manifest) -> RowOptimizer:
    """Return the step of a program's optimizer on rows; see :func:`nfdt.model.program.row_updates.why_dense`."""
    return _OPTIMIZERS[manifest.optimizer_class](manifest.optimizer_options)
