"""A Horovod script: one program, started once per rank. Only its import differs from a script for Horovod itself.

mpirun -np 2 python examples/horovod/digits.py
horovodrun -np 2 python examples/horovod/digits.py
"""

import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hfdt.keras as hvd  # was: import horovod.tensorflow.keras as hvd


def load_data() -> tuple[tf.data.Dataset, tuple, int]:
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(
        images.astype("float32").reshape(-1, 8, 8, 1) / 16.0, labels, test_size=0.2, random_state=0, stratify=labels
    )
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(2000, seed=hvd.rank()).batch(32)
    return dataset, (x_test, y_test), len(x) // 32


def main() -> None:
    # Horovod: start.
    hvd.init()

    # Horovod: pin the GPU to be used to the local rank.
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    dataset, test_data, batches = load_data()
    model = keras.Sequential(
        [
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )

    # Horovod: scale the learning rate by the number of ranks, and distribute the optimizer.
    scaled_lr = 0.002 * hvd.size()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    ]
    # Horovod: one rank saves and prints.
    if hvd.rank() == 0 and len(sys.argv) > 1:
        callbacks.append(keras.callbacks.ModelCheckpoint(f"{sys.argv[1]}/checkpoint.keras"))
    verbose = 2 if hvd.rank() == 0 else 0

    model.fit(dataset, steps_per_epoch=batches // hvd.size(), callbacks=callbacks, epochs=8, verbose=verbose)
    _, accuracy = model.evaluate(*test_data, verbose=0)
    print(f"rank {hvd.rank()} test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
