"""A training loop as one writes it by hand for Horovod: one rank of it, started by mpirun or horovodrun."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from benchmarks.images import training_images
from benchmarks.overhead import BATCH, CASES, SEED


def train(case: str, samples: int, epochs: int, data_dir: Path | None) -> list[float]:
    """Seconds of each epoch on this rank."""
    images, labels, _ = training_images(samples, data_dir)
    rank, size = hvd.rank(), hvd.size()
    own = tf.data.Dataset.from_tensor_slices((images[rank::size], labels[rank::size]))
    batches = own.shuffle(len(images) // size, seed=SEED).batch(BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    model = CASES[case][0]()
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    loss, accuracy = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            value = loss_of(y, predicted)
        gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
        model.optimizer.apply(hvd.grouped_allreduce(gradients, op=hvd.Average), model.trainable_variables)
        loss.update_state(value)
        accuracy.update_state(y, predicted)

    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        for x, y in batches:
            step(x, y)
        float(loss.result()), float(accuracy.result())
        seconds.append(time.perf_counter() - began)
    return seconds


def run_rank() -> None:
    """Entry point of ``python -m benchmarks.horovod_loop``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args()
    hvd.init()
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    seconds = train(options.case, options.samples, options.epochs, options.data_dir)
    if hvd.rank() == 0:
        options.result.write_text(json.dumps(seconds))


if __name__ == "__main__":
    run_rank()
