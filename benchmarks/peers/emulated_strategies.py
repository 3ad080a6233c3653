"""tf_keras on emulated workers: MultiWorkerMirroredStrategy and ParameterServerStrategy, one process per role.

A step computes its gradient and sleeps until the emulated duration has passed; then the gradient is reduced or sent.
With ParameterServerStrategy the weights are read within that time, which favours it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
import tf_keras
from tensorflow.python.data.experimental.ops.testing import sleep

from benchmarks.workloads.batches import shuffled_batches
from benchmarks.workloads.emulated import Training
from benchmarks.workloads.images import load_images
from benchmarks.workloads.models import build
from benchmarks.workloads.timed_epochs import EpochTimer, TimedEpoch

STEP_FILE = "step_s"


def gradients_of(model: Any, loss_of: Any, x: Any, y: Any) -> list[Any]:
    """Return the gradients of one batch's mean loss."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(loss_of(y, model(x, training=True)))
    return tape.gradient(loss, model.trainable_variables)


def clock_of(training: Training, model: Any, learning_rate: float) -> EpochTimer:
    """Return a timer that tests a copy of the model outside any strategy."""
    copy = build("small", tf_keras, learning_rate)
    images, labels = load_images(training.test_data)

    def test() -> float:
        copy.set_weights([variable.numpy() for variable in model.trainable_variables])
        return float(copy.evaluate(images, labels, batch_size=500, verbose=0)[1])

    return EpochTimer(training.goal, test)


def mirror(training: Training, worker: int) -> list[TimedEpoch]:
    """Train with MultiWorkerMirroredStrategy; collective. The first worker tests and decides when to stop."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    learning_rate = training.learning_rate * training.workers  # one update for the batches of all workers
    with strategy.scope():
        model = build("small", tf_keras, learning_rate, seed=training.seed)
        loss_of = tf_keras.losses.SparseCategoricalCrossentropy(reduction="none")
    clock = clock_of(training, model, learning_rate)
    began = [0.0]

    def hold(gradient: Any) -> Any:
        time.sleep(max(0.0, training.step_s[worker] - (time.perf_counter() - began[0])))
        return gradient

    def replica_step(x: Any, y: Any) -> None:
        gradients = gradients_of(model, loss_of, x, y)
        with tf.control_dependencies(gradients):
            first = tf.py_function(hold, [gradients[0]], gradients[0].dtype)
            first.set_shape(gradients[0].shape)
        with tf.control_dependencies([first]):
            held = [first, *(tf.identity(gradient) for gradient in gradients[1:])]
        # The strategy sums the gradients.
        shares = [gradient / training.workers for gradient in held]
        model.optimizer.apply_gradients(zip(shares, model.trainable_variables, strict=True))

    @tf.function
    def step(x: Any, y: Any) -> None:
        strategy.run(replica_step, args=(x, y))

    images, labels = load_images(training.data)
    own = slice(worker, None, training.workers)
    batches = iter(shuffled_batches(images[own], labels[own], training.batch).repeat())
    anybody = _any_of_all(strategy)
    ended = False
    while not ended:
        clock.begin()
        for _ in range(training.samples // (training.batch * training.workers)):
            x, y = next(batches)
            began[0] = time.perf_counter()
            step(x, y)
        ended = anybody(worker == 0 and clock.end())
    return clock.epochs


def _any_of_all(strategy: Any) -> Any:
    """Return a collective function that is true if its argument is true on any worker."""

    @tf.function
    def add_up(mine: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(tf.identity, args=(mine,)), axis=None)

    return lambda mine: float(add_up(tf.constant(float(mine)))) > 0


def serve(training: Training, resolver: Any, folder: Path) -> None:
    """Run as a worker or parameter server until terminated; a worker's step reads its duration from its directory."""
    if resolver.task_type == "worker":
        own = folder / f"worker-{resolver.task_id}"
        own.mkdir()
        (own / STEP_FILE).write_text(str(training.step_s[resolver.task_id]))
        os.chdir(own)
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
        start=True,
    )
    server.join()


def coordinate(training: Training, resolver: Any) -> list[TimedEpoch]:
    """Train with ParameterServerStrategy: one update per batch, by the next idle worker."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = build("small", tf_keras, training.learning_rate, seed=training.seed)
        model.optimizer.build(model.trainable_variables)
    loss_of = tf_keras.losses.SparseCategoricalCrossentropy(reduction="none")
    clock = clock_of(training, model, training.learning_rate)
    images, labels = load_images(training.data)
    batches = coordinator.create_per_worker_dataset(lambda: shuffled_batches(images, labels, training.batch).repeat())

    def replica_step(x: Any, y: Any) -> None:
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            gradients = gradients_of(model, loss_of, tf.identity(x), y)
        with tf.control_dependencies(gradients):
            slept = _sleep_until(began + _own_step_s())
        with tf.control_dependencies([slept]):
            held = [tf.identity(gradient) for gradient in gradients]
        model.optimizer.apply_gradients(zip(held, model.trainable_variables, strict=True))

    @tf.function
    def step(iterator: Any) -> None:
        strategy.run(replica_step, args=next(iterator))

    iterator, ended = iter(batches), False
    while not ended:
        clock.begin()
        for _ in range(training.samples // training.batch):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        ended = clock.end()
    return clock.epochs


def _own_step_s() -> Any:
    """Return the seconds of a step, read from the worker's directory; steps are graphs, without Python."""
    return tf.strings.to_number(tf.io.read_file(STEP_FILE), tf.float64)


def _sleep_until(moment: Any) -> Any:
    rest_us = tf.cast(tf.maximum(moment - tf.timestamp(), 0.0) * 1e6, tf.int64)
    # The dataset sleeps before each element, also before its end is detected: take() avoids the second sleep.
    naps = tf.data.Dataset.range(1).apply(sleep(rest_us)).take(1)
    return naps.reduce(tf.constant(0, tf.int64), lambda _, element: element)


def run_role() -> None:
    """Entry point of ``python -m benchmarks.peers.emulated_strategies``; TF_CONFIG holds the role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    training = Training.load(options.training)
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    if "ps" not in config["cluster"]:
        epochs = mirror(training, task["index"])
    else:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        if task["type"] in ("worker", "ps"):
            serve(training, resolver, options.training.parent)
            return
        epochs = coordinate(training, resolver)
    if task["index"] == 0:
        options.result.write_text(json.dumps(epochs))


if __name__ == "__main__":
    run_role()
