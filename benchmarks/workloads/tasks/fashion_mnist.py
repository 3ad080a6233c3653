"""Fashion-MNIST with an MLP of 52 k weights; scikit-learn's digits where the data are absent."""

from __future__ import annotations

from pathlib import Path

import keras

from benchmarks.workloads.images import read_images
from benchmarks.workloads.tasks.task import StudyTask, TaskData

MEAN, DEVIATION = 0.286, 0.353


def read(data_dir: Path | None) -> TaskData:
    """Read the images; see :func:`read_images`."""
    train, test = (read_images(data_dir, part) for part in ("train", "test"))
    return TaskData(train.name, (train.images, train.labels), (test.images, test.labels))


def mlp() -> keras.Model:
    """Return an MLP of 52 k weights."""
    hidden = [keras.layers.Dense(width, activation="relu") for width in (64, 32)]
    scaled = keras.layers.Rescaling(1 / DEVIATION, -MEAN / DEVIATION)
    output = keras.layers.Dense(10, activation="softmax")
    return keras.Sequential([keras.Input((28, 28, 1)), scaled, keras.layers.Flatten(), *hidden, output])


FASHION_MNIST = StudyTask("fashion-mnist", "Fashion-MNIST, an MLP", read, mlp)
