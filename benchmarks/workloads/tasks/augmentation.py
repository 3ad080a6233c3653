"""The standard augmentation of CIFAR-10 as a layer: each image is shifted, and every second one mirrored."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

SEED = 20_151_210


@keras.saving.register_keras_serializable(package="nfdt-benchmarks")
class ShiftAndFlip(keras.layers.Layer):
    """Pad by zeros, crop every image at its own place, and mirror it with probability 1/2; only in training.

    Zeros mean the average pixel: the layer follows the one that gives pixels mean 0. All images of a batch are gathered
    by one ``take`` of pixels, which is quick on processors and the same on every backend.

    The seed is constant, because simulated trainings of one process share a model: results then do not depend on which
    training came before. The order of samples follows the training's own seed.

    Args:
        pixels: Greatest shift in each direction.

    References:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
    """

    def __init__(self, pixels: int, **options: Any) -> None:
        super().__init__(**options)
        self.pixels = pixels
        self.seed_generator = keras.random.SeedGenerator(SEED)

    def call(self, images: Any, training: bool = False) -> Any:
        """Return images (n, h, w, c), shifted and mirrored if ``training``."""
        if not training:
            return images
        (_, height, width, channels), edge = images.shape, self.pixels
        count = ops.shape(images)[0]
        padded = ops.pad(images, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
        rows = self._drawn(count, 2 * edge + 1)[:, None] + ops.arange(height)
        columns = ops.arange(width)
        mirrored = self._drawn(count, 2)[:, None] * (width - 1 - 2 * columns) + columns
        columns = self._drawn(count, 2 * edge + 1)[:, None] + mirrored
        first = ops.arange(count) * ((height + 2 * edge) * (width + 2 * edge))
        places = first[:, None, None] + rows[:, :, None] * (width + 2 * edge) + columns[:, None, :]
        pixels = ops.take(ops.reshape(padded, (-1, channels)), ops.reshape(places, (-1,)), axis=0)
        return ops.reshape(pixels, (-1, height, width, channels))

    def _drawn(self, count: Any, below: int) -> Any:
        """Return an integer from 0 up to, without, ``below`` for every image."""
        return keras.random.randint((count,), 0, below, dtype="int32", seed=self.seed_generator)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "pixels": self.pixels}
