"""The user's own ``train_step``, run as it is, as a function of weights and batch."""

from __future__ import annotations

from typing import Any

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.training.direct_call import Prepared
from nfdt.core.training.flat_weights import WeightSetter
from nfdt.core.training.gradient_step import GradientResult, direct_call, step_logs


class LocalStep:
    """One training step with the model's own optimizers; what it pushes is the difference of weights that it makes.

    Optimizers, as many as there are, step in the order of ``train_step``, and later parts of the step see their
    updates. Assignments to weights count as well, as those of a moving average. See
    :mod:`nfdt.core.program.local_optimizers`.

    Args:
        model: A compiled model whose optimizers are built.
        layout: Layout of its trainable variables.
    """

    def __init__(self, model: Any, layout: ParameterLayout) -> None:
        self._model = model
        self._weights = WeightSetter(model, layout)
        self._run = direct_call(self._traced, model)

    @property
    def traces(self) -> int:
        """Number of traces of the step; 0 for an eager model."""
        return self._run.traces

    def prepare(self, batch: Any) -> Prepared:
        """Convert a pytree of arrays to the tensors that the step needs, ahead of the call."""
        return self._run.prepare(batch)

    def __call__(self, weights: Any, batch: Any, *, version: int | None = None, share: float = 1.0) -> GradientResult:
        """Train on one batch; the gradient of the result is the weights before minus the weights after the step.

        ``version`` and ``share`` are ignored: the step is that of plain Keras with this batch.

        Raises:
            CaptureError: ``train_step`` returns logs that cannot be distributed.
            Exception: any exception of the user's code.
        """
        prepared = batch if isinstance(batch, Prepared) else self.prepare(batch)
        difference, logs = self._run(weights, prepared)
        return GradientResult(difference, logs, finite=True)

    def _traced(self, weights: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        self._weights(weights)
        before = self._weights.read()  # as the variables' dtypes hold them
        logs = step_logs(self._model.train_step(batch), "train_step")
        return before - self._weights.read(), logs
