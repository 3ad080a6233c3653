"""Cost of presets on measured workers, and the choice of the best one: pure, without clock or thread."""

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
