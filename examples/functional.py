"""A functional model with two inputs and two outputs; losses and loss weights by name.

nfdt run --workers 2 examples/functional.py
"""

import keras
from sklearn.datasets import load_digits


def build_model() -> keras.Model:
    upper = keras.Input((32,), name="upper")
    lower = keras.Input((32,), name="lower")
    features = keras.layers.Concatenate()([upper, lower])
    features = keras.layers.Dense(64, activation="relu")(features)
    digit = keras.layers.Dense(10, activation="softmax", name="digit")(features)
    even = keras.layers.Dense(1, activation="sigmoid", name="even")(features)
    return keras.Model({"upper": upper, "lower": lower}, {"digit": digit, "even": even})


def main() -> None:
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    images = images.astype("float32") / 16.0
    x = {"upper": images[:, :32], "lower": images[:, 32:]}
    y = {"digit": labels, "even": (labels % 2 == 0).astype("float32")[:, None]}
    model = build_model()
    model.compile(
        optimizer="adam",
        loss={"digit": "sparse_categorical_crossentropy", "even": "binary_crossentropy"},
        loss_weights={"digit": 1.0, "even": 0.5},
        metrics={"digit": ["accuracy"], "even": ["accuracy"]},
    )
    history = model.fit(x, y, batch_size=32, epochs=5, validation_split=0.2, verbose=2)
    for name in ("digit", "even"):
        print(f"validation accuracy of {name}: {history.history[f'val_{name}_accuracy'][-1]:.4f}")


if __name__ == "__main__":
    main()
