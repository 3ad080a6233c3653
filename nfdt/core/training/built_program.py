"""A program's model with its traced steps, which the next job of the same program may use again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nfdt.core.keras_internals import flatten_layers
from nfdt.core.program.manifest import Manifest
from nfdt.core.program.unpack import load
from nfdt.core.training.predict import PredictStep
from nfdt.core.training.steps import EvaluationStep, TrainingStep


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
