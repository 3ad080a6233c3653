"""Steps of a model on the backend that Keras has loaded, and a program's model with them, which other jobs may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.core.backends.lanes import BatchedStep
from nfdt.core.backends.step_result import GradientResult
from nfdt.core.errors import CaptureError
from nfdt.core.keras_internals import flatten_layers
from nfdt.core.program.compiling import leaf_metrics, merges_itself, overrides
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.unpack import load
from nfdt.core.training.predict import PredictStep

LANES = 32
"""Most gradients of one call, as each needs its own activations; an estimate for ResNet-20 with batches of 128."""


class PreparedBatch(Protocol):
    """A batch in the form that a step takes."""

    @property
    def samples(self) -> int:
        """Number of samples in the batch."""
        ...


class TrainingStep(Protocol):
    """One training step of a model: the gradient of a batch at given weights."""

    @property
    def traces(self) -> int:
        """Number of traces of the step."""
        ...

    def prepare(self, batch: Any) -> Any:
        """Convert a pytree of arrays to a :class:`PreparedBatch`, ahead of the call."""
        ...

    def __call__(self, weights: Any, batch: Any, *, version: int | None = None, share: float = 1.0) -> GradientResult:
        """Compute the gradient of a batch.

        Args:
            weights: Flat weights.
            batch: A pytree of arrays, or prepared.
            version: Number of updates applied so far.
            share: Fraction of the samples of a union of batches in this one, whose gradients are combined by their
                denominators; see :mod:`nfdt.core.backends.denominator`.
        """
        ...


class EvaluationStep(Protocol):
    """One evaluation step of a model, which updates its metrics."""

    def __call__(self, weights: Any, batch: Any) -> dict[str, Any]:
        """Return the logs of a batch, a pytree of arrays, at flat weights."""
        ...


def gradient_step(
    model: Any, layout: ParameterLayout, *, loss_scale: Mapping[str, Any] | None = None, tables: Sequence[int] = ()
) -> TrainingStep:
    """Return the training step of a compiled, built model, whose optimizer it replaces.

    Args:
        model: The model.
        layout: Layout of its trainable variables.
        loss_scale: The program's ``loss_scale``; None takes it from the model's own LossScaleOptimizer.
        tables: Variables, by index, whose gradients are returned as rows; on TensorFlow only.

    Raises:
        CaptureError: tables on another backend.
    """
    backend = keras.backend.backend()
    if tables and backend != "tensorflow":
        raise CaptureError(
            f"Embeddings that are exchanged by rows: expected workers on TensorFlow. Received: one on {backend}."
        )
    if backend == "jax":
        from nfdt.core.backends.jax_step import JaxGradientStep

        return JaxGradientStep(model, layout, loss_scale=loss_scale)
    if backend == "torch":
        from nfdt.core.backends.torch_step import TorchGradientStep

        return TorchGradientStep(model, layout, loss_scale=loss_scale)
    from nfdt.core.backends.tensorflow_step import GradientStep

    return GradientStep(model, layout, loss_scale=loss_scale, tables=tables)


def make_step(model: Any, manifest: Manifest, tables: Sequence[int] = ()) -> TrainingStep:
    """Return the training step of a worker, for a program's model: one of gradients, or one that runs as it is."""
    if manifest.steps_on_workers:
        from nfdt.core.backends.tensorflow_step import LocalStep

        return LocalStep(model, manifest.layout)
    return gradient_step(model, manifest.layout, loss_scale=manifest.loss_scale, tables=tables)


def default_lanes() -> int:
    """Return the number of gradients that are best computed in one call here.

    More than one is faster on accelerators only: on CPUs a convolution with other weights in each lane is slower than
    one after the other.
    """
    if keras.backend.backend() != "jax":
        return 1
    import jax

    return 1 if jax.default_backend() == "cpu" else LANES


def batched_step(step: TrainingStep) -> BatchedStep | None:
    """Return the step of several gradients in one call; None where it would give other results than ``step``.

    It resets the metrics of the model.
    """
    if keras.backend.backend() != "jax":
        return None
    from nfdt.core.backends.jax_batched_step import JaxBatchedStep
    from nfdt.core.backends.jax_step import JaxGradientStep

    return JaxBatchedStep(step) if isinstance(step, JaxGradientStep) and _fits(step) else None


def _fits(step: Any) -> bool:
    """Return whether the gradients of a model can be computed together with the results of one by one.

    The step must be Keras' own, whose logs are the results of the metrics; compiled, as Keras would compile it; with
    metrics that add up, see docs/decisions/0021; and without a loss scale that each step changes.
    """
    model = step.model
    own = not overrides(model, "train_step") and not overrides(model, "compute_metrics")
    compiled = model.jit_compile and not model.run_eagerly
    scaled = len(step.optimizer.variables) > 2  # besides iterations and learning rate
    return bool(own and compiled and not scaled and model.trainable_variables) and _add_up(model)


def _add_up(model: Any) -> bool:
    """Return whether what the metrics count for several batches is the sum of what they count for each."""
    metrics = leaf_metrics(model)
    variables = [variable for metric in metrics for variable in metric.variables]
    return (
        len(variables) == len(model.metrics_variables)
        and not any(map(merges_itself, metrics))
        and all(v.aggregation == "sum" and np.dtype(v.value.dtype).kind in "fiu" for v in variables)
    )


def evaluation_step(model: Any, layout: ParameterLayout) -> EvaluationStep:
    """Return the evaluation step of a compiled, built model."""
    if keras.backend.backend() == "jax":
        from nfdt.core.backends.jax_step import JaxEvaluateStep

        return JaxEvaluateStep(model, layout)
    if keras.backend.backend() == "torch":
        from nfdt.core.backends.torch_step import TorchEvaluateStep

        return TorchEvaluateStep(model, layout)
    from nfdt.core.backends.tensorflow_step import EvaluateStep

    return EvaluateStep(model, layout)


def prediction_step(model: Any, layout: ParameterLayout) -> PredictStep:
    """Return the prediction step of a compiled, built model."""
    if keras.backend.backend() == "jax":
        from nfdt.core.backends.jax_step import JaxOutputStep

        return PredictStep(JaxOutputStep(model, layout))
    if keras.backend.backend() == "torch":
        from nfdt.core.backends.torch_step import TorchOutputStep

        return PredictStep(TorchOutputStep(model, layout))
    from nfdt.core.backends.tensorflow_step import OutputStep

    return PredictStep(OutputStep(model, layout))


@dataclass(frozen=True)
class BuiltProgram:
    """A model and its steps after a job.

    Attributes:
        manifest: Program that the model was built from.
        model: The model, whose optimizer records gradients.
        step: Its training step, with its traces.
        evaluate: Its evaluation step, with its traces.
        predict: Its prediction step, with its traces.
    """

    manifest: Manifest
    model: Any
    step: TrainingStep
    evaluate: EvaluationStep
    predict: PredictStep

    def serves(self, manifest: Manifest) -> bool:
        """Whether a job of this manifest can use the model: the programs differ in state and sample batch at most."""
        return self.manifest.is_same_program(manifest) and (manifest.predicts or not self.manifest.predicts)

    def restart(self, manifest: Manifest, read: Callable[[str], bytes]) -> None:
        """Give the model the initial state of this manifest, as a new one would have it.

        Args:
            manifest: A manifest that the program serves.
            read: Returns an artifact's bytes by its sha256.
        """
        load(self.model, manifest, read)


def is_reusable(manifest: Manifest, model: Any, tables: Sequence[int]) -> bool:
    """Whether the whole state of the model is in its variables, so that another job can begin with it.

    Objects of a script may hold anything. Layers that are adapted to data compute with copies of their variables,
    which a trace contains. A loss scale and tables that are exchanged by rows keep a state of their own.
    """
    if manifest.carries_code or manifest.scales_loss or tables:
        return False
    return not any(hasattr(layer, "finalize_state") for layer in flatten_layers(model))
