"""Small grey images for benchmarks: Fashion-MNIST where it can be had, else scikit-learn's digits, enlarged."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

HEADER_BYTES = {"images": 16, "labels": 8}


def _read_idx(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    def read(kind: str, suffix: str) -> np.ndarray:
        with gzip.open(folder / f"{part}-{suffix}-ubyte.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=HEADER_BYTES[kind])

    labels = read("labels", "labels-idx1")
    return read("images", "images-idx3").reshape(len(labels), 28, 28), labels


def _enlarged_digits() -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    images = np.kron(digits.images * (255 / 16), np.ones((1, 3, 3)))
    return np.pad(images, ((0, 0), (2, 2), (2, 2))), digits.target


def training_images(samples: int, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray, str]:
    """``samples`` images (28, 28, 1) in [0, 1], float32, their labels, and the name of the data.

    Args:
        samples: How many; smaller data are repeated.
        data_dir: Folder that holds ``fashion-mnist/*.gz``; without it the digits are used.
    """
    if data_dir is not None:
        images, labels = _read_idx(data_dir / "fashion-mnist", "train")
        name = "fashion-mnist"
    else:
        images, labels = _enlarged_digits()
        name = "digits"
    rows = np.arange(samples) % len(images)
    return (images[rows, ..., None] / 255.0).astype("float32"), labels[rows].astype("int32"), name
