"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers


def resnet(shape: tuple[int, ...], *, widths: Sequence[int], blocks: int, first: Sequence[Any] = ()) -> keras.Model:
    """Return a residual network of ``2 * blocks * len(widths) + 2`` layers for 10 classes.

    Args:
        shape: Shape of an image, (h, w, c).
        widths: Channels of each stage; every stage but the first halves height and width.
        blocks: Blocks of two convolutions in each stage.
        first: Layers that prepare the images.

    References:
        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2: ResNet-20 is
        ``widths=(16, 32, 64), blocks=3``. Where the shape changes, shortcuts take every second pixel and add channels
        of zeros (option A), which have no weights.
    """
    images = keras.Input(shape)
    x = images
    for layer in first:
        x = layer(x)
    x = _convolution(x, widths[0])
    for stage, width in enumerate(widths):
        for block in range(blocks):
            x = _block(x, width, narrows=stage > 0 and block == 0)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(10, activation="softmax")(x))


def _block(x: Any, width: int, *, narrows: bool) -> Any:
    y = _convolution(x, width, strides=2 if narrows else 1)
    y = _convolution(y, width, activation=None)
    if narrows:
        x = layers.MaxPooling2D(1, strides=2)(x)
        x = layers.Concatenate()([x, layers.Rescaling(0.0)(x)])
    return layers.ReLU()(layers.Add()([x, y]))


def _convolution(x: Any, width: int, *, strides: int = 1, activation: str | None = "relu") -> Any:
    x = layers.Conv2D(width, 3, strides, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.Activation(activation)(x) if activation else x
