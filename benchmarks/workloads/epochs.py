"""Start times of epochs, with any Keras and in hand-written loops: one clock for all processes of a machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

now = time.monotonic


def watch_epochs(keras: Any) -> tuple[Any, list[float]]:
    """Return a callback, and the list to which it appends the start time of each epoch.

    The callback uses no weights: otherwise a cluster would send them every epoch.
    """
    begins: list[float] = []
    return keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begins.append(now())), begins


@dataclass(frozen=True)
class Work:
    """Length of one measured training; ``epochs`` excludes the first one, which traces."""

    samples: int
    epochs: int
    runs: int


@dataclass(frozen=True)
class Measured:
    """One training: samples per second between the first and the last epoch, and the start-up time in s."""

    samples_per_s: float
    startup_s: float


def measured(begins: list[float], samples: int, began: float) -> Measured:
    """Return speed and start-up time, computed from the start times of epochs.

    The excess of the first epoch, which traces, over the others counts as start-up; the last epoch is left out.

    Args:
        begins: Start time of each epoch; at least three.
        samples: Number of samples per epoch.
        began: Start time of the training or the program.
    """
    epoch_s = (begins[-1] - begins[1]) / (len(begins) - 2)
    return Measured(samples / epoch_s, begins[1] - began - epoch_s)
