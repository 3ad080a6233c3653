"""Recommender on tf_keras with ParameterServerStrategy: one update per batch, by the next idle worker."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
import tf_keras

from benchmarks.workloads.epochs import now
from benchmarks.workloads.recommender import Recommendation, Trained, build, peak_mb


def coordinate(training: Recommendation, resolver: Any) -> Trained:
    """Train; tables are cut by rows over the parameter servers."""
    cut = tf.distribute.experimental.partitioners.FixedShardsPartitioner(training.shards)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=cut)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = build(tf_keras, training)
        model.optimizer.build(model.trainable_variables)
    loss_of = tf_keras.losses.BinaryCrossentropy(reduction="none")

    def batches() -> Any:
        data = tf.data.Dataset.from_tensor_slices(training.data())
        return data.shuffle(training.samples).batch(training.batch, drop_remainder=True).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(batches))

    def replica_step(inputs: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(labels[:, None], model(inputs, training=True)))
        model.optimizer.minimize(loss, model.trainable_variables, tape)

    @tf.function
    def step(iterator: Any) -> None:
        strategy.run(replica_step, args=next(iterator))

    began = now()
    for _ in range(training.epochs):
        began = now()
        for _ in range(training.samples // training.batch):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
    return Trained(now() - began, _peaks())


def _peaks() -> list[float]:
    """Return the peak memory of the workers, which the same process has started."""
    launcher = os.getppid()  # its main thread has started them
    processes = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    roles = {pid: _variables(pid).get("TF_CONFIG", "") for pid in processes}
    return [peak_mb(pid) for pid, text in roles.items() if text and json.loads(text)["task"]["type"] == "worker"]


def _variables(pid: str) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def main() -> None:
    """Entry point of ``python -m benchmarks.peers.recommender_servers``; TF_CONFIG holds the role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Recommendation.load)
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        role = {"job_name": resolver.task_type, "task_index": resolver.task_id}
        tf.distribute.Server(resolver.cluster_spec(), protocol="grpc", start=True, **role).join()
    options.result.write_text(json.dumps(asdict(coordinate(options.training, resolver))))


if __name__ == "__main__":
    main()
