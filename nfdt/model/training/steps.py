"""Steps of a model on the loaded backend, and a model with its steps that later jobs of the program can use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from nfdt.core.arrays.layout import Array, ParameterLayout
from nfdt.core.errors import CaptureError
from nfdt.model.backends.contract import RowNumbersOf, TrainingStep, current
from nfdt.model.backends.job_progress import JobProgress
from nfdt.model.backends.lanes import BatchedStep
from nfdt.model.keras_internals.models import flatten_layers
from nfdt.model.program.compiling import leaf_metrics, merges_itself, overrides
from nfdt.model.program.local_optimizers import stepping_parts
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.unpack import load
from nfdt.model.training.predict import MAX_OUTPUT_BYTES, PredictStep

EvaluationStep = Callable[[Any, Any], dict[str, Any]]
"""A step that updates the model's metrics: the logs of a batch, a pytree of arrays, at flat weights."""


def gradient_step(
    model: Any,
    layout: ParameterLayout,
    *,
    loss_scale: Mapping[str, Any] | None = None,
    tables: Sequence[int] = (),
    copies: Sequence[Any] = (),
) -> TrainingStep:
    """Return the training step of a compiled, built model; see ``KerasBackend.gradient_step``.

    Raises:
        CaptureError: tables on a backend without rows.
    """
    backend = current()
    if tables and not backend.has_rows:
        raise CaptureError(
            f"Embeddings that are exchanged by rows: expected workers on TensorFlow. Received: one on {backend.name}."
        )
    return backend.gradient_step(model, layout, loss_scale, tables, copies)


def make_step(
    model: Any, manifest: Manifest, tables: Sequence[int] = (), copies: Sequence[Any] = (), *, rate: float = 1.0
) -> TrainingStep:
    """Return the training step of a worker, for a program's model: one of gradients, or one that runs as it is.

    Args:
        model: The model.
        manifest: Its program.
        tables: Variables, by index, that are exchanged by rows.
        copies: The model on other devices, see ``KerasBackend.gradient_step``.
        rate: Factor of the learning rates of optimizers that step here.
    """
    if manifest.steps_on_workers:
        return current().local_step(model, manifest.layout, JobProgress(stepping_parts(model, manifest), rate))
    return gradient_step(model, manifest.layout, loss_scale=manifest.loss_scale, tables=tables, copies=copies)


def why_undivided(model: Any, manifest: Manifest, tables: Sequence[int], outside: Sequence[Any]) -> str | None:
    """Return why copies of a program's model on other devices cannot compute parts of its steps; None if they can.

    Args:
        model: The model.
        manifest: Its program.
        tables: Variables, by index, that are exchanged by rows.
        outside: What the program has besides the model's variables: others, and attributes of eager code.
    """
    if manifest.steps_on_workers:
        return "its optimizers step on the workers, so that a step has no gradient"
    if tables:
        return "gradients of embeddings are exchanged by rows, unless sparse=False"
    if manifest.loss_scale is not None:
        return "the scale of its loss follows each gradient"
    if outside:
        return "it runs eagerly, or has variables besides the model's"
    return None if _add_up(model) else "its metrics are not sums over samples"


def batched_step(step: TrainingStep) -> BatchedStep | None:
    """Return the step of several gradients in one call; None where it would give other results than ``step``.

    The step must be Keras' own, whose logs are the results of the metrics, with metrics that add up; see
    docs/decisions/0021. The batched step resets the metrics of the model.
    """
    model = step.model
    own = not overrides(model, "train_step") and not overrides(model, "compute_metrics")
    return current().batched_step(step) if own and model.trainable_variables and _add_up(model) else None


def _add_up(model: Any) -> bool:
    """Return whether the metrics of several batches together are the sums of the metrics of each."""
    metrics = leaf_metrics(model)
    variables = [variable for metric in metrics for variable in metric.variables]
    return (
        len(variables) == len(model.metrics_variables)
        and not any(map(merges_itself, metrics))
        and all(
            v.aggregation == "sum" and (keras.backend.is_float_dtype(v.dtype) or keras.backend.is_int_dtype(v.dtype))
            for v in variables
        )
    )


def evaluation_step(model: Any, layout: ParameterLayout) -> EvaluationStep:
    """Return the evaluation step of a compiled, built model."""
    return current().call(model, layout, "test_step")


def prediction_step(model: Any, layout: ParameterLayout) -> PredictStep:
    """Return the prediction step of a compiled, built model.

    Raises:
        CaptureError: (in the step) the outputs exceed :data:`MAX_OUTPUT_BYTES`.
    """
    run = current().call(model, layout, "predict_step")

    def predict(weights: Any, batch: Any) -> list[Array]:
        leaves = [keras.ops.convert_to_numpy(leaf) for leaf in run(weights, batch)]
        if (size := sum(leaf.nbytes for leaf in leaves)) > MAX_OUTPUT_BYTES:
            raise CaptureError(
                f"predict: expected outputs of at most {MAX_OUTPUT_BYTES} bytes per batch. Received: {size} bytes. "
                "Choose a smaller batch_size, or evaluate=False."
            )
        return leaves

    return predict


def evaluated_rows(model: Any, method: str) -> RowNumbersOf | None:
    """Return what an evaluation, or with the method ``predict`` a prediction, looks up in tables on the shards.

    None if no table of the model is there.
    """
    tables = current().lookups(model)
    if tables is None:
        return None
    return tables.numbers_of(model.predict_step if method == "predict" else model.test_step)


@dataclass(frozen=True)
class BuiltProgram:
    """A model and its steps after a job.

    Attributes:
        manifest: Program that the model was built from.
        model: The model, whose optimizer records gradients.
        step: Its training step, with its traces.
        evaluate: Its evaluation step, with its traces.
        predict: Its prediction step, with its traces.
        devices: Devices on which it was made.
        rate: Factor of the learning rates of optimizers that step here.
    """

    manifest: Manifest
    model: Any
    step: TrainingStep
    evaluate: EvaluationStep
    predict: PredictStep
    devices: tuple[str, ...]
    rate: float = 1.0

    def serves(self, manifest: Manifest, devices: tuple[str, ...], rate: float = 1.0) -> bool:
        """Whether a job on these devices can use the model: the programs differ in state and sample batch at most."""
        if (self.devices, self.rate) != (devices, rate):
            return False
        # A model that was built without targets has no variables of metrics, and serves ``predict`` only (decision 51).
        return self.manifest.is_same_program(manifest) and (manifest.predicts or not self.manifest.predicts)

    def restart(self, manifest: Manifest, read: Callable[[str], bytes | memoryview]) -> None:
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
