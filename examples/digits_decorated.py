"""Handwritten digits with plain Keras and one additional decorator: ``@distribute``.

python examples/digits_decorated.py                trains on two workers of this machine
"""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from nfdt import distribute


@distribute(workers=2)
def main() -> None:
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        images.astype("float32") / 16.0, labels, test_size=0.2, random_state=0, stratify=labels
    )
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=32, epochs=8, validation_split=0.1)
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    print(f"test accuracy: {accuracy:.4f}")
    for name, worker in sorted(history.nfdt.items()):
        print(f"{name}: {worker['samples']} samples in {worker['steps']} steps")


if __name__ == "__main__":
    main()
