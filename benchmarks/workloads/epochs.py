"""Times at which epochs begin, in any Keras and in loops written by hand: one clock for all processes of a machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

now = time.monotonic


def watch_epochs(keras: Any) -> tuple[Any, list[float]]:
    """Return a callback, and the list to which it adds the time at which each epoch begins.

    It is one of Keras' own that looks at no weights: another would make a cluster send them every epoch.
    """
    begins: list[float] = []

    def schedule(epoch: int, learning_rate: float) -> float:
        begins.append(now())
        return learning_rate

    return keras.callbacks.LearningRateScheduler(schedule), begins


@dataclass(frozen=True)
class Work:
    """Length of one measured training; ``epochs`` does not count the first one, which traces."""

    samples: int
    epochs: int
    runs: int


@dataclass(frozen=True)
class Measured:
    """One training: samples per second between the first epoch and the last, and the start-up time in s."""

    samples_per_s: float
    startup_s: float


def measured(begins: list[float], samples: int, began: float) -> Measured:
    """Derive speed and start-up time from the times at which epochs began.

    The first epoch, which traces, counts as start-up as far as it took longer than the others; the last is left out.

    Args:
        begins: Time at which each epoch began; at least three.
        samples: Samples of one epoch.
        began: Time at which the training, or the program, was started.
    """
    epoch_s = (begins[-1] - begins[1]) / (len(begins) - 2)
    return Measured(samples / epoch_s, begins[1] - began - epoch_s)
