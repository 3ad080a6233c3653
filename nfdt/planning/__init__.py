"""What a choice on the axes will cost on measured workers, and which choice is best: pure, no clock, no thread."""

from nfdt.planning.choice import PlanChoice, choose
from nfdt.planning.cost_model import (
    Cluster,
    Groups,
    PlannedPreset,
    Prediction,
    SharedLink,
    WorkerCost,
    flat_presets,
    predict,
)

__all__ = [
    "PlanChoice",
    "Cluster",
    "Groups",
    "Prediction",
    "PlannedPreset",
    "SharedLink",
    "WorkerCost",
    "choose",
    "flat_presets",
    "predict",
]
