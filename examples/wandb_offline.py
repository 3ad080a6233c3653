"""Weights & Biases records a distributed training: its callback for Keras runs in the script, as ever.

Run: WANDB_MODE=offline nfdt run --workers 2 examples/wandb_offline.py

Without WANDB_MODE=offline it sends the metrics to its server, where you must be logged in.
"""

import keras
import wandb
from sklearn.datasets import load_digits
from wandb.integration.keras import WandbMetricsLogger


def main() -> None:
    """Train a classifier of digits, and print the accuracy that Weights & Biases has recorded."""
    data = load_digits()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    with wandb.init(project="digits") as run:
        model.fit(data.data / 16.0, data.target, batch_size=32, epochs=8, verbose=0, callbacks=[WandbMetricsLogger()])
        print(f"recorded accuracy: {run.summary['epoch/accuracy']:.3f}")


if __name__ == "__main__":
    main()
