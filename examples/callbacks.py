"""Keras' callbacks and a custom one: each runs once, in this process, on the results of all workers.

nfdt run --workers 2 examples/callbacks.py
"""

import keras
import numpy as np
from sklearn.datasets import load_digits


class WeightNorm(keras.callbacks.Callback):
    """Callback that reads the model's weights at the end of each epoch, as any callback may."""

    def on_epoch_end(self, epoch, logs=None):
        """Print the norm of all weights."""
        norm = np.sqrt(sum(float(np.sum(np.square(w))) for w in self.model.get_weights()))
        print(f"epoch {epoch + 1}: norm of the weights {norm:.3f}")


def main() -> None:
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    x, y = images.astype("float32") / 16.0, labels
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        x,
        y,
        batch_size=32,
        epochs=12,
        validation_split=0.2,
        verbose=2,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=2),
            keras.callbacks.EarlyStopping(
                monitor="val_accuracy", patience=3, min_delta=0.01, restore_best_weights=True
            ),
            WeightNorm(),
        ],
    )
    rates = ", ".join(f"{float(rate):.5f}" for rate in history.history["learning_rate"])
    print(f"epochs trained: {len(history.epoch)}; learning rates: {rates}")
    print(f"best validation accuracy: {max(history.history['val_accuracy']):.4f}")


if __name__ == "__main__":
    main()
