"""A task of the convergence study: data, model, loss, score, and the options it is trained with by default."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

Samples = tuple[np.ndarray, np.ndarray]
"""Inputs and targets of the same length."""

VALIDATION_SHARE = 0.1
SPLITS = ("test", "validation")


@dataclass(frozen=True)
class TaskData:
    """Samples of a task.

    Attributes:
        name: Name of the task in results; another one if other data take the place of the task's.
        train: Samples for training.
        test: Samples evaluated after every epoch.
    """

    name: str
    train: Samples
    test: Samples

    def split(self, split: str) -> TaskData:
        """Return these data, or for ``validation`` 90 % of the training samples with the other 10 % as test samples."""
        if split == "test":
            return self
        order = np.random.default_rng(0).permutation(len(self.train[0]))
        held_out = round(VALIDATION_SHARE * len(order))
        x, y = self.train
        test, train = ((x[rows], y[rows]) for rows in (order[:held_out], order[held_out:]))
        return TaskData(self.name, train, test)

    def take(self, samples: int | None) -> TaskData:
        """Return the data with at most this number of training samples; None: all."""
        x, y = self.train
        return replace(self, train=(x[:samples], y[:samples]))


@dataclass(frozen=True)
class StudyTask:
    """A task of the study.

    Attributes:
        name: Name on the command line and in results.
        title: Data and model, for people.
        read: Reads the samples from a folder; None: its module's default.
        make: Makes the model without compiling it; its weights follow from the global seed.
        loss: Loss of Keras.
        metrics: Makes the metrics.
        metric: Name of the score, ``accuracy`` or ``R2``.
        chance: Score without learning.
        more: Returns further figures for the results from the logs of the last evaluation and the test targets.
        optimizer: Default optimizer.
        rate: Default learning rate.
        momentum: Default momentum of SGD.
        weight_decay: Default decoupled weight decay.
        epochs: Default number of epochs.
        batch: Size of a local batch.
    """

    name: str
    title: str
    read: Callable[[Path | None], TaskData]
    make: Callable[[], keras.Model]
    loss: str = "sparse_categorical_crossentropy"
    metrics: Callable[[], Sequence[Any]] = lambda: ["accuracy"]
    metric: str = "accuracy"
    chance: float = 0.1
    more: Callable[[Mapping[str, float], np.ndarray], dict[str, float]] = lambda logs, targets: {}
    optimizer: str = "sgd"
    rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    epochs: int = 3
    batch: int = 128

    def build(self, seed: int, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        """Return a compiled model with initial weights from a seed; models of all seeds have the same names."""
        keras.utils.clear_session()
        keras.utils.set_random_seed(seed)
        model = self.make()
        model.compile(optimizer, self.loss, metrics=list(self.metrics()))
        return model

    def score(self, logs: Mapping[str, float], targets: np.ndarray) -> float:
        """Return the score of an evaluation; a training that diverged gets at most the score of chance.

        Args:
            logs: Logs of an epoch with those of its evaluation as ``val_*``.
            targets: Targets of the evaluated samples; R2 is ``1 - MSE / variance of the targets``, and at least 0.
        """
        if self.metric == "accuracy":
            score = float(logs["val_accuracy"])
        else:
            score = max(0.0, 1.0 - float(logs["val_loss"]) / float(np.var(targets, dtype=np.float64)))
        return score if math.isfinite(score) else self.chance


def read_file(data_dir: Path | None, name: str) -> Path:
    """Return the path of a task's file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if data_dir is None or not (data_dir / name).exists():
        raise FileNotFoundError(
            f"Data: expected --data-dir with a folder that holds {name}. Received: {data_dir}, which does not."
        )
    return data_dir / name


def standardised(array: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return float32 values with mean 0 and deviation 1 over the training samples, by column."""
    mean, deviation = train.mean(0, dtype=np.float64), train.std(0, dtype=np.float64)
    return ((array - mean) / deviation).astype(np.float32)
