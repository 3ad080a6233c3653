"""MLflow records a distributed training: its callback for Keras runs in the script, as ever.

Run: nfdt run --workers 2 examples/mlflow_callback.py
"""

import keras
import mlflow
from sklearn.datasets import load_digits


def main() -> None:
    """Train a classifier of digits, and print the accuracy that MLflow has recorded."""
    data = load_digits()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    with mlflow.start_run() as run:
        callback = mlflow.keras.MlflowCallback(run)
        model.fit(data.data / 16.0, data.target, batch_size=32, epochs=8, verbose=0, callbacks=[callback])
    recorded = mlflow.get_run(run.info.run_id).data
    print(f"recorded accuracy: {recorded.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
