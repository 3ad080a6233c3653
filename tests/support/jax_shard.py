"""Shards on JAX beside Keras' optimizer alone: prints the greatest difference of their weights by case, as JSON."""

from __future__ import annotations

import json

import keras
import numpy as np

from tests.support.shard_cluster import Cluster, Reference

SCHEDULE = {"decay_steps": 6, "warmup_target": 0.1, "warmup_steps": 2}
CASES = {
    "plain": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.0, **SCHEDULE), momentum=0.9),
    "ddc": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "dc-a": lambda: keras.optimizers.AdamW(0.01),
}


def differences() -> dict[str, float]:
    """Return the differences after eight gradients without delay, applied by two shards."""
    found, random = {}, np.random.default_rng(0)
    for rule, make in CASES.items():
        reference = Reference(make())
        cluster = Cluster(reference, rule=rule, shards=2)
        cluster.pull()
        for _ in range(8):
            gradient = random.normal(size=reference.layout.size).astype(np.float32)
            reference.apply(gradient)
            cluster.push(gradient)
        found[rule] = float(np.abs(cluster.weights - reference.weights).max())
    return found


if __name__ == "__main__":
    print(json.dumps({"backend": keras.backend.backend(), **differences()}))
