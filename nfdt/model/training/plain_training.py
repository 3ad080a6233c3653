"""Plain Keras training in this process, for comparison: a fresh start, and a timer of epochs."""

from __future__ import annotations

from typing import Any

import keras

from nfdt.core.clock import Clock


def reset_keras(seed: int) -> None:
    """Clear the names of earlier models, and seed Keras, NumPy and Python."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)


class EpochTimer(keras.callbacks.Callback):
    """Measures the epochs after the first, which compiles, and stops the training before it exceeds a budget."""

    def __init__(self, clock: Clock, budget_s: float) -> None:
        super().__init__()
        self._clock, self._budget_s, self._began = clock, budget_s, 0.0
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the measurement of an epoch."""
        self._began = self._clock.now()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add an epoch; stop where another one would exceed the budget."""
        seconds = self._clock.now() - self._began
        self.seconds += [seconds] if epoch else []
        if self.seconds and sum(self.seconds) + seconds > self._budget_s:
            self.model.stop_training = True
