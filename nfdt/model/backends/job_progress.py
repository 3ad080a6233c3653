"""Learning rates of optimizers that step on workers: schedules follow the progress of the whole job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import keras

from nfdt.model.keras_internals.training import (
    learning_rate_method,
    raw_learning_rate,
    replace_learning_rate_method,
)


class JobProgress:
    """Position of a worker's step among the steps of the job, at which the schedules of its optimizers are evaluated.

    A worker makes a part of the steps only. Its optimizer's own count would end a schedule late.

    Args:
        optimizers: Optimizers of a worker's model.
        factor: Factor of their learning rates; 1 leaves those without a schedule as they are.

    Attributes:
        position: Number of the job's steps before the one that runs, 0-d, or a tensor of the graph that is traced.
            None, or negative: the optimizer's own count.
    """

    def __init__(self, optimizers: Iterable[Any] = (), factor: float = 1.0) -> None:
        self.position: Any = None
        for optimizer in optimizers:
            rate = learning_rate_method(optimizer)
            if isinstance(raw_learning_rate(optimizer), keras.optimizers.schedules.LearningRateSchedule):
                rate = partial(self._scheduled, optimizer)
            elif factor == 1.0:
                continue
            replace_learning_rate_method(optimizer, rate if factor == 1.0 else partial(_scaled, rate, factor))

    def _scheduled(self, optimizer: Any) -> Any:
        own = keras.ops.convert_to_tensor(optimizer.iterations)
        if self.position is None:
            return raw_learning_rate(optimizer)(own)
        position = keras.ops.cast(self.position, own.dtype)
        return raw_learning_rate(optimizer)(keras.ops.where(position < 0, own, position))


def _scaled(rate: Callable[[], Any], factor: float) -> Any:
    return rate() * factor
