"""NFDT jobs on emulated workers, one per preset; flat ones share a server with running workers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import keras
from nfdt_client.embedded import EmbeddedServer

import nfdt
from benchmarks.workloads.emulated import Training
from benchmarks.workloads.images import load_images
from benchmarks.workloads.models import build
from benchmarks.workloads.timed_epochs import EpochTimer, TimedEpoch
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.job import resolve_algorithm

GROUP_BATCHES = 2.0


def batches_per_update(algorithm: AlgorithmSpec, workers: int) -> float:
    """Return the number of local batches per update, by which every peer multiplies its learning rate.

    Goyal et al., arXiv:1706.02677: an update of k merged batches takes k times the rate of one batch.
    """
    if algorithm.exchange_facts.local:
        return 1.0  # each step is one of the script's
    if algorithm.consistency == "bsp" and algorithm.topology in ("flat", "ring"):
        return workers
    if algorithm.consistency == "softsync":
        return max(1, workers // algorithm.softsync_n)
    return GROUP_BATCHES if algorithm.topology == "groups" else 1.0


class TimedEpochs(keras.callbacks.Callback):
    """Callback that times epochs, tests after each, and stops the training at its goal.

    Args:
        clock: Timer of the epochs.

    Attributes:
        accuracy: That of the workers' validation after the last epoch, if there is one.
    """

    def __init__(self, clock: EpochTimer) -> None:
        super().__init__()
        self._clock = clock
        self.accuracy = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the timer as the workers begin."""
        self._clock.begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take the time, and test."""
        self.accuracy = float((logs or {}).get("val_accuracy", 0.0))
        self.model.stop_training = self._clock.end()


class Cluster:
    """Workers on this machine for any number of jobs; leaving the context ends them."""

    def __init__(self, workers: int) -> None:
        self._server = EmbeddedServer(workers, 1)

    def __enter__(self) -> Cluster:
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop()

    def train(self, preset: str, training: Training) -> list[TimedEpoch]:
        """Train with a preset; rings and groups start separate ranks."""
        own = {"server": self._server.address(), "token": self._server.token}
        return train(preset, training, own if resolve_algorithm(preset).topology == "flat" else {})


def train(preset: str, training: Training, options: Mapping[str, Any]) -> list[TimedEpoch]:
    """Train with a preset and further options, by default on the server that the environment names."""
    learning_rate = training.learning_rate * batches_per_update(resolve_algorithm(preset), training.workers)
    model = build(training.model, keras, learning_rate, seed=training.seed)
    images, labels = load_images(training.data)
    test_images, test_labels = load_images(training.test_data)
    if training.model == "2.5M":  # bytes, a quarter of what floats would take to reach machines behind slow links
        images, test_images = ((255 * pixels).round().astype("uint8") for pixels in (images, test_images))

    def test() -> float:
        return float(model.evaluate(test_images, test_labels, batch_size=500, verbose=0)[1])

    clock = EpochTimer(training.goal, (lambda: timed.accuracy) if training.closing else test)
    timed = TimedEpochs(clock)
    callbacks, closing = [timed], {}
    if training.closing:
        file = tempfile.NamedTemporaryFile(suffix=".keras", dir=training.data.parent, delete=False).name
        callbacks = [keras.callbacks.ModelCheckpoint(file), timed]
        closing = {"validation_data": (test_images, test_labels), "validation_batch_size": 500}
    rows, epochs = slice(training.samples), training.goal.most_epochs
    emulated = {"emulate.step_ms": tuple(1000 * seconds for seconds in training.step_s)}
    with nfdt.session(options={"workers": training.workers, "algorithm": preset, **emulated, **options}):
        model.fit(
            images[rows],
            labels[rows],
            batch_size=training.batch,
            epochs=epochs,
            verbose=0,
            callbacks=callbacks,
            **closing,
        )
    return clock.epochs
