"""Record of all fits of this process: the logs of each epoch, and when it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

SEED_STEP = 1000  # between the seeds of two repetitions of a script that sets its own


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the logs that are single numbers."""
    return {name: float(value) for name, value in (logs or {}).items() if isinstance(value, int | float)}


@contextmanager
def recorded_fits(repetition: int) -> Iterator[list[list[dict[str, Any]]]]:
    """Yield a list that gets one list per fit, with ``seconds`` since the fit's start and ``logs`` of each epoch.

    Inside the block the seeds of ``keras.utils.set_random_seed`` differ between repetitions, also those that a script
    sets itself.

    Args:
        repetition: Number of the repetition; 0 leaves the seeds as they are.
    """
    import keras

    history, utils = keras.callbacks.History, keras.utils
    begin, end, seed = history.on_train_begin, history.on_epoch_end, utils.set_random_seed
    fits: list[list[dict[str, Any]]] = []
    running: dict[int, tuple[float, list[dict[str, Any]]]] = {}

    def on_train_begin(self: Any, logs: Any = None) -> None:
        begin(self, logs)
        fits.append([])
        running[id(self)] = time.perf_counter(), fits[-1]

    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        end(self, epoch, logs)
        began, epochs = running[id(self)]
        epochs.append({"seconds": time.perf_counter() - began, "logs": _numbers(logs)})

    history.on_train_begin, history.on_epoch_end = on_train_begin, on_epoch_end
    utils.set_random_seed = lambda value: seed(value + SEED_STEP * repetition)
    try:
        utils.set_random_seed(0)
        yield fits
    finally:
        history.on_train_begin, history.on_epoch_end, utils.set_random_seed = begin, end, seed
