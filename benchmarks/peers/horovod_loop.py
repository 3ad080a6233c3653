"""Hand-written training loops for Horovod: one rank, started by mpirun or horovodrun."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from benchmarks.workloads.batches import shuffled_batches
from benchmarks.workloads.epochs import now
from benchmarks.workloads.images import load_images
from benchmarks.workloads.models import build
from benchmarks.workloads.work import work_options


def make_step(model: Any, metrics: dict[str, Any], *, compiled: bool) -> Callable[[Any, Any], None]:
    """Return a step: gradient, allreduce, optimizer.

    Args:
        model: Model with a built optimizer.
        metrics: Metrics ``loss`` and ``accuracy``.
        compiled: Whether XLA compiles the parts before and after the allreduce, which it cannot compile itself.
    """
    variables = model.trainable_variables
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function(jit_compile=compiled)
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = loss_of(y, predicted)
        metrics["loss"].update_state(loss)
        metrics["accuracy"].update_state(y, predicted)
        return tape.gradient(loss, [v.value for v in variables])

    @tf.function(jit_compile=compiled)
    def apply(reduced: Any) -> None:
        model.optimizer.apply(reduced, variables)

    @tf.function
    def step(x: Any, y: Any) -> None:
        apply(hvd.grouped_allreduce(gradients(x, y), op=hvd.Average))

    return step


def train(case: str, data: Path, batch: int, epochs: int, *, compiled: bool) -> list[float]:
    """Train and return the time at which each epoch began."""
    images, labels = load_images(data)
    rank, size = hvd.rank(), hvd.size()
    batches = shuffled_batches(images[rank::size], labels[rank::size], batch)
    model = build(case, keras)
    metrics = {"loss": keras.metrics.Mean(), "accuracy": keras.metrics.SparseCategoricalAccuracy()}
    model.optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
    step = make_step(model, metrics, compiled=compiled)
    begins = []
    for _ in range(epochs):
        begins.append(now())
        for x, y in batches:
            step(x, y)
        logs = hvd.grouped_allreduce([metric.result() for metric in metrics.values()], op=hvd.Average)
        assert all(float(value) >= 0 for value in logs)
        for metric in metrics.values():
            metric.reset_state()
    return begins


def run_rank() -> None:
    """Train without XLA, then with it: entry point of ``python -m benchmarks.peers.horovod_loop``."""
    options = work_options(__doc__)
    hvd.init()
    threads = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    work = (options.case, options.data, options.batch, options.epochs)
    begins = {name: train(*work, compiled=name == "xla") for name in ("plain", "xla")}
    if hvd.rank() == 0:
        options.result.write_text(json.dumps(begins))
    hvd.shutdown()


if __name__ == "__main__":
    run_rank()
