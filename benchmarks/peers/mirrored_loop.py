"""One process of tf_keras with MultiWorkerMirroredStrategy; TF_CONFIG holds its rank."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
import tf_keras

from benchmarks.workloads.batches import shuffled_batches
from benchmarks.workloads.epochs import watch_epochs
from benchmarks.workloads.images import load_images
from benchmarks.workloads.models import build
from benchmarks.workloads.work import work_options


def train(case: str, data: Path, batch: int, epochs: int, strategy: Any) -> list[float]:
    """Train and return the time at which each epoch began."""
    images, labels = load_images(data)

    def own_part(context: Any) -> Any:
        index, count = context.input_pipeline_id, context.num_input_pipelines
        return shuffled_batches(images[index::count], labels[index::count], batch)

    with strategy.scope():
        model = build(case, tf_keras)
    watch, begins = watch_epochs(tf_keras)
    steps = len(images) // (batch * strategy.num_replicas_in_sync)
    # With an endless input the workers need no rendezvous in every step.
    batches = strategy.distribute_datasets_from_function(lambda context: own_part(context).repeat())
    model.fit(batches, steps_per_epoch=steps, epochs=epochs, verbose=0, callbacks=[watch])
    return begins


def run_worker() -> None:
    """Entry point of ``python -m benchmarks.peers.mirrored_loop``."""
    options = work_options(__doc__)
    cluster = json.loads(os.environ["TF_CONFIG"])
    threads = max(1, len(os.sched_getaffinity(0)) // len(cluster["cluster"]["worker"]))
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    begins = train(options.case, options.data, options.batch, options.epochs, strategy)
    if cluster["task"]["index"] == 0:
        options.result.write_text(json.dumps(begins))


if __name__ == "__main__":
    run_worker()
