"""Models trained by the benchmarks, with Keras 3 or Keras 2 as an argument."""

from __future__ import annotations

from typing import Any

SEED = 1
CASES = ("mlp", "cnn", "10M")  # 0.1 M, 1 M and 10 M parameters


def build(case: str, keras: Any, learning_rate: float = 0.01, *, seed: int = SEED, **compile_options: Any) -> Any:
    """Build a compiled classifier of grey images (28, 28, 1).

    Args:
        case: One of ``CASES``; ``small``: a CNN of 9 k parameters whose step takes a few milliseconds; ``2.5M``: for
            images in 0 to 255.
        keras: ``keras`` or ``tf_keras``.
        learning_rate: Learning rate of SGD with momentum 0.9.
        seed: Seed of the initial weights, and of what is drawn after them.
        **compile_options: Further arguments of ``compile``.
    """
    keras.utils.set_random_seed(seed)
    inside = {"mlp": _mlp, "cnn": _cnn, "10M": _wide, "small": _small, "2.5M": _dense}[case](keras.layers)
    output = keras.layers.Dense(10, activation="softmax")
    model = keras.Sequential([keras.layers.InputLayer((28, 28, 1)), *inside, output])
    optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], **compile_options)
    return model


def _mlp(layers: Any) -> list[Any]:
    return [layers.Flatten(), layers.Dense(128, activation="relu")]


def _cnn(layers: Any) -> list[Any]:
    return [*_convolutions(layers, 32, 64), layers.Dense(312, activation="relu")]


def _wide(layers: Any) -> list[Any]:
    return [layers.Flatten(), *(layers.Dense(width, activation="relu") for width in (2500, 2500, 700))]


def _dense(layers: Any) -> list[Any]:
    return [
        layers.Rescaling(1 / 255),
        layers.Flatten(),
        *(layers.Dense(n, activation="relu") for n in (1060, 1060, 512)),
    ]


def _small(layers: Any) -> list[Any]:
    return _convolutions(layers, 8, 16)


def _convolutions(layers: Any, first: int, second: int) -> list[Any]:
    return [
        layers.Conv2D(first, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(second, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    ]
