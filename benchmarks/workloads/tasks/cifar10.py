"""CIFAR-10 with a small CNN and ResNet-20, and at half its size, for two cores, with a CNN and ResNet-8."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import keras
import numpy as np

from benchmarks.workloads.images import read_cifar10
from benchmarks.workloads.tasks.augmentation import ShiftAndFlip
from benchmarks.workloads.tasks.resnet import resnet
from benchmarks.workloads.tasks.task import StudyTask, TaskData

MEAN, DEVIATION = 0.473, 0.251
RESNET_RATE, RESNET_DECAY = 0.1, 1e-4  # He et al., section 4.2


def read(data_dir: Path | None, name: str = "cifar10") -> TaskData:
    """Read the images; see :func:`read_cifar10`."""
    train, test = (read_cifar10(data_dir, part) for part in ("train", "test"))
    return TaskData(name, (train.images, train.labels), (test.images, test.labels))


def read_smaller(data_dir: Path | None, name: str) -> TaskData:
    """Read the images at half their size, (n, 16, 16, 3): every pixel is the mean of four."""
    data = read(data_dir)
    return TaskData(name, *((at_half_size(x), y) for x, y in (data.train, data.test)))


def at_half_size(images: np.ndarray) -> np.ndarray:
    """Return images (n, h, w, c) at half their height and width, as means over squares of four pixels."""
    count, height, width, channels = images.shape
    return images.reshape(count, height // 2, 2, width // 2, 2, channels).mean((2, 4), dtype=np.float32)


def scaled() -> keras.layers.Layer:
    """Return the layer that gives pixels mean 0 and deviation 1."""
    return keras.layers.Rescaling(1 / DEVIATION, -MEAN / DEVIATION)


def cnn(side: int = 32) -> keras.Model:
    """Return a CNN for images of this side: 60 k weights for 32 pixels, 32 k for 16."""
    layers = [keras.Input((side, side, 3)), scaled()]
    for width in (16, 32, 64):
        layers += [keras.layers.Conv2D(width, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
    hidden = keras.layers.Dense(32, activation="relu")
    return keras.Sequential([*layers, keras.layers.Flatten(), hidden, keras.layers.Dense(10, activation="softmax")])


def resnet20() -> keras.Model:
    """Return ResNet-20, 0.27 M weights, with shifts by up to 4 pixels and flips."""
    return resnet((32, 32, 3), widths=(16, 32, 64), blocks=3, first=[scaled(), ShiftAndFlip(4)])


def resnet8() -> keras.Model:
    """Return ResNet-8 for images of 16 by 16 pixels, 19 k weights, with shifts by up to 2 pixels and flips."""
    return resnet((16, 16, 3), widths=(8, 16, 32), blocks=1, first=[scaled(), ShiftAndFlip(2)])


CIFAR10 = StudyTask("cifar10", "CIFAR-10, a CNN", read, cnn)
CIFAR10_CNN16 = StudyTask(
    "cifar10-cnn16",
    "CIFAR-10 at 16 by 16 pixels, a CNN",
    partial(read_smaller, name="cifar10-cnn16"),
    partial(cnn, side=16),
)
CIFAR10_RESNET20 = StudyTask(
    "cifar10-resnet20",
    "CIFAR-10, ResNet-20",
    partial(read, name="cifar10-resnet20"),
    resnet20,
    rate=RESNET_RATE,
    weight_decay=RESNET_DECAY,
    epochs=14,
)
CIFAR10_RESNET8 = StudyTask(
    "cifar10-resnet8",
    "CIFAR-10 at 16 by 16 pixels, ResNet-8",
    partial(read_smaller, name="cifar10-resnet8"),
    resnet8,
    rate=RESNET_RATE,
    weight_decay=RESNET_DECAY,
    epochs=10,
)
