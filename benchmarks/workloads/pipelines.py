"""Image pipeline as users write it: CIFAR-10's binary records, decoded and augmented by tf.data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

SIDE, CHANNELS, CLASSES = 32, 3, 10
PIXELS = SIDE * SIDE * CHANNELS
RECORD_BYTES = 1 + PIXELS  # a label, then red, green and blue planes: the format of CIFAR-10's binary version
PADDED = SIDE + 8
SEED = 1


def write_records(files: Sequence[Path], samples: int, data_dir: Path | None) -> str:
    """Write files of records and return the name of the data: CIFAR-10, or noise of the same shape without it.

    Args:
        files: Files to write, with equal numbers of records.
        samples: Number of records in all; more than the first half of CIFAR-10 has are repeated.
        data_dir: Folder that may hold ``cifar10-train-part1.npz``.
    """
    part = data_dir / "cifar10-train-part1.npz" if data_dir is not None else None
    if part is not None and part.exists():
        rows = np.arange(samples)
        with np.load(part) as arrays:
            images, labels = (np.take(arrays[key], rows, axis=0, mode="wrap") for key in ("x_train", "y_train"))
        name = "cifar10"
    else:
        draw = np.random.default_rng(SEED)
        images = draw.integers(0, 256, (samples, SIDE, SIDE, CHANNELS), np.uint8)
        labels, name = draw.integers(0, CLASSES, samples), "noise of CIFAR-10's shape"
    planes = images.transpose(0, 3, 1, 2).reshape(samples, PIXELS)
    records = np.concatenate([labels.astype(np.uint8).reshape(-1, 1), planes], axis=1)
    for path, rows_of_file in zip(files, np.split(records, len(files)), strict=True):
        rows_of_file.tofile(path)
    return name


def augmented(files: Sequence[str], batch: int) -> Any:
    """Return a ``tf.data.Dataset`` of batches: random crop, flip and colour of each image."""
    import tensorflow as tf

    def decode(record: Any) -> Any:
        values = tf.io.decode_raw(record, tf.uint8)
        planes = tf.reshape(values[1:], (CHANNELS, SIDE, SIDE))
        image = tf.cast(tf.transpose(planes, (1, 2, 0)), tf.float32) / 255.0
        image = tf.image.random_crop(tf.image.resize_with_crop_or_pad(image, PADDED, PADDED), (SIDE, SIDE, CHANNELS))
        image = tf.image.random_brightness(tf.image.random_flip_left_right(image), 0.2)
        image = tf.image.random_saturation(tf.image.random_contrast(image, 0.8, 1.2), 0.8, 1.2)
        return image, tf.cast(values[0], tf.int32)

    records = tf.data.FixedLengthRecordDataset(list(files), RECORD_BYTES).shuffle(2000)
    batches = records.map(decode, num_parallel_calls=tf.data.AUTOTUNE).batch(batch)
    return batches.prefetch(tf.data.AUTOTUNE)
