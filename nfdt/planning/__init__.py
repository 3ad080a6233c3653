"""What a choice on the axes will cost on measured workers, and which choice is best: pure, no clock, no thread."""

from nfdt.planning.choice import Choice, choose
from nfdt.planning.cost_model import Batch, Cluster, Groups, Prediction, Row, SharedLink, WorkerCost, flat_rows, predict

__all__ = [
    "Batch",
    "Choice",
    "Cluster",
    "Groups",
    "Prediction",
    "Row",
    "SharedLink",
    "WorkerCost",
    "choose",
    "flat_rows",
    "predict",
]
