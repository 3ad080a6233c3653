"""California housing with an MLP: the median value of houses in a district, from eight figures.

Pace and Barry, "Sparse Spatial Autoregressions", Statistics and Probability Letters 33, 1997.
"""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np

from benchmarks.workloads.tasks.task import StudyTask, TaskData, read_file, standardised

FILE = "california_housing.npz"
TRAIN_SHARE = 0.8


def read(data_dir: Path | None) -> TaskData:
    """Read ``california_housing.npz``: x (20640, 8), y in dollars; 80 % of them, drawn once, are for training."""
    with np.load(read_file(data_dir, FILE)) as arrays:
        return prepare(arrays["x"], arrays["y"])


def prepare(x: np.ndarray, y: np.ndarray) -> TaskData:
    """Return inputs (n, 8) and targets (n, 1), both standardised with the training part."""
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [round(TRAIN_SHARE * len(order))])
    inputs, targets = (standardised(each, each[train]) for each in (x, y[:, None]))
    return TaskData("housing", *((inputs[rows], targets[rows]) for rows in (train, test)))


def mlp() -> keras.Model:
    """Return an MLP of 5 k weights for a number."""
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1)])


HOUSING = StudyTask(
    "housing",
    "California housing, an MLP",
    read,
    mlp,
    loss="mean_squared_error",
    metrics=lambda: [],
    metric="R2",
    chance=0.0,
    rate=0.05,
    epochs=10,
    batch=64,
)
