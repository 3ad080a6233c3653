"""Generated data that exist only batch by batch: this process feeds them to the workers.

nfdt run --workers 2 examples/generator_data.py
"""

from collections.abc import Iterator

import keras
import numpy as np
from sklearn.datasets import load_digits

BATCH = 32


def shifted_digits(images: np.ndarray, labels: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield endless batches of digits, each image shifted by up to one pixel."""
    rng = np.random.default_rng(seed)
    while True:
        rows = rng.integers(0, len(images), BATCH)
        shifts = rng.integers(-1, 2, (BATCH, 2))
        batch = [np.roll(images[row], shift, axis=(0, 1)) for row, shift in zip(rows, shifts, strict=True)]
        yield np.stack(batch)[..., None], labels[rows]


def main() -> None:
    keras.utils.set_random_seed(1)
    digits = load_digits()
    images, labels = digits.images.astype("float32") / 16.0, digits.target
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(shifted_digits(images, labels, seed=0), steps_per_epoch=50, epochs=5, verbose=2)
    _, accuracy = model.evaluate(images[..., None], labels, verbose=0)
    print(f"accuracy on unshifted digits: {accuracy:.4f}")


if __name__ == "__main__":
    main()
