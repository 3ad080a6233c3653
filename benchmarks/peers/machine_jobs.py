"""Jobs of the benchmark ``machines``: ``python -m benchmarks.peers.machine_jobs NAME JSON`` runs one of them.

The environment names the server. The result is the last line of the output, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import nfdt
from benchmarks.peers.hetero_jobs import TimedEpochs, train
from benchmarks.workloads.emulated import Training
from benchmarks.workloads.models import SEED
from benchmarks.workloads.pipelines import CHANNELS, CLASSES, SIDE, augmented
from benchmarks.workloads.timed_epochs import EpochTimer, Goal

WIDTH = 1580  # two layers of this width have 2.5 M parameters, 10 MB


def timed(epochs: int) -> EpochTimer:
    """Return a timer of this many epochs, without tests."""
    return EpochTimer(Goal(0.0, epochs, epochs, float("inf")), lambda: 0.0)


def push(steps: int, epochs: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a model of 10 MB with batches of one sample, so that all time goes into pushes."""
    keras.utils.set_random_seed(SEED)
    layers = [keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    x = np.random.default_rng(SEED).normal(size=(steps, 16)).astype("float32")
    clock = timed(epochs)
    with nfdt.session(options=options):
        model.fit(x, x[:, :1], batch_size=1, epochs=epochs, verbose=0, callbacks=[TimedEpochs(clock)])
    return {"seconds": [seconds for seconds, _ in clock.epochs], "bytes": 4 * model.count_params()}


def hybrid(training: str, preset: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train to a target accuracy on workers of unequal speed."""
    return {"epochs": train(preset, Training.load(Path(training)), options)}


def images(files: list[str], batch: int, epochs: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a small CNN on an image pipeline with augmentation."""
    keras.utils.set_random_seed(SEED)
    layers = [
        keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(CLASSES, activation="softmax"),
    ]
    model = keras.Sequential([keras.Input((SIDE, SIDE, CHANNELS)), *layers])
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    clock = timed(epochs)
    with nfdt.session(options=options):
        model.fit(augmented(files, batch), epochs=epochs, verbose=0, callbacks=[TimedEpochs(clock)])
    return {"seconds": [seconds for seconds, _ in clock.epochs]}


JOBS = {job.__name__: job for job in (push, hybrid, images)}

if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
