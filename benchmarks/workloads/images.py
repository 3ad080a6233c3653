"""Small grey images for benchmarks: Fashion-MNIST if available, else scikit-learn's digits, enlarged."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HEADER_BYTES = {"images": 16, "labels": 8}
KERAS_CACHE = Path.home() / ".keras" / "datasets"
TEST_DIGITS = 360


@dataclass(frozen=True)
class Images:
    """Images (n, 28, 28, 1) in [0, 1], float32, their labels, int32, and the name of the data."""

    images: np.ndarray
    labels: np.ndarray
    name: str

    def take(self, samples: int) -> Images:
        """Return the first ``samples``; smaller data are repeated."""
        rows = np.arange(samples) % len(self.images)
        return Images(self.images[rows], self.labels[rows], self.name)

    def save(self, path: Path) -> None:
        """Write an ``.npz`` file that :func:`load_images` reads."""
        np.savez(path, images=self.images, labels=self.labels)


def load_images(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read images and labels that :meth:`Images.save` wrote."""
    with np.load(path) as arrays:
        return arrays["images"], arrays["labels"]


def read_images(data_dir: Path | None, part: str = "train") -> Images:
    """Read Fashion-MNIST from ``data_dir``, else from the cache of ``keras.datasets``, else the digits.

    Args:
        data_dir: Folder that holds ``fashion-mnist/*.gz``.
        part: ``train`` or ``test``.
    """
    folder = (data_dir or KERAS_CACHE) / "fashion-mnist"
    if data_dir is not None or (folder / "train-images-idx3-ubyte.gz").exists():
        images, labels, name = *_read_idx(folder, {"test": "t10k"}.get(part, part)), "fashion-mnist"
    else:
        images, labels, name = *_enlarged_digits(part), "digits"
    return Images((images[..., None] / 255.0).astype("float32"), labels.astype("int32"), name)


def read_cifar10(data_dir: Path | None, part: str = "train") -> Images:
    """Read CIFAR-10 from ``data_dir``, else from ``keras.datasets``, which may download it; images (n, 32, 32, 3).

    Args:
        data_dir: Folder that holds ``cifar10-train-part1.npz``, ``cifar10-train-part2.npz`` and ``cifar10-test.npz``.
        part: ``train`` or ``test``.
    """
    if data_dir is None:
        import keras

        images, labels = keras.datasets.cifar10.load_data()[part == "test"]
    else:
        files = ["cifar10-test.npz"] if part == "test" else [f"cifar10-train-part{i}.npz" for i in (1, 2)]
        found = []
        for file in files:
            with np.load(data_dir / file) as arrays:
                found.append((arrays[f"x_{part}"], arrays[f"y_{part}"]))
        images, labels = (np.concatenate(each) for each in zip(*found, strict=True))
    return Images((images / 255.0).astype("float32"), labels.reshape(-1).astype("int32"), "cifar10")


def training_images(samples: int, data_dir: Path | None) -> Images:
    """Return ``samples`` training images."""
    return read_images(data_dir).take(samples)


def _read_idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    def read(kind: str, suffix: str) -> np.ndarray:
        with gzip.open(folder / f"{part}-{suffix}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=HEADER_BYTES[kind])

    labels = read("labels", "labels-idx1")
    return read("images", "images-idx3").reshape(len(labels), 28, 28), labels


def _enlarged_digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    rows = slice(TEST_DIGITS, None) if part == "train" else slice(TEST_DIGITS)
    images = np.kron(digits.images[rows] * (255 / 16), np.ones((1, 3, 3)))
    return np.pad(images, ((0, 0), (2, 2), (2, 2))), digits.target[rows]
