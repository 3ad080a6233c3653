"""Measured epochs of a captured model on this machine: by Keras' own ``fit``, and by one real worker with one shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from nfdt_client.options import Options
from nfdt_client.session import Session

from nfdt.cli.quiet import quiet_start
from nfdt.core import keras_internals
from nfdt.core.clock import Clock, SystemClock
from nfdt.core.specs.job import ClusterSpec, resolve_algorithm
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.core.training.epoch_timer import EpochTimer
from nfdt.core.training.host_batches import leaves, map_arrays, rows_of
from nfdt.planning.calibration import MeasuredEpochs, MeasuredWorker, measured_worker
from nfdt.schedulers import StepTime

EPOCH_S = 1.0  # an epoch is shortened to about as much computation
LEAST_STEPS = 8  # of an epoch, where the script's has as many: the coordinator's estimate needs some
MOST_BYTES = 256 * 2**20  # of the data
MOST_EPOCHS = 10  # after the first one
BUDGET_S = 4.0


@dataclass(frozen=True)
class RepeatedBatch:
    """A script's first batch, as often as an epoch has steps.

    Attributes:
        batch: Dense arrays as ``train_step`` takes them.
        steps: Steps of an epoch.
    """

    batch: Any
    steps: int

    @classmethod
    def of(cls, batch: Any, steps: int, step_s: float) -> RepeatedBatch | None:
        """Return the data of an epoch that is no longer than the script's; None: some of them are not dense arrays.

        Args:
            batch: The first batch.
            steps: Steps of the script's epoch.
            step_s: Seconds of a step, roughly.
        """
        arrays = leaves(batch)
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return None
        fitting = MOST_BYTES // max(1, sum(array.nbytes for array in arrays))
        wanted = max(LEAST_STEPS, round(EPOCH_S / step_s))
        return cls(batch, max(1, min(steps, wanted, fitting)))

    def arguments(self, timer: EpochTimer) -> dict[str, Any]:
        """Return the arguments of ``fit``."""
        data = map_arrays(lambda array: np.tile(array, (self.steps, *(1,) * (array.ndim - 1))), self.batch)
        x, y, sample_weight = keras_internals.unpack_batch(data)
        names = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": rows_of(self.batch)}
        return {**names, "epochs": 1 + MOST_EPOCHS, "shuffle": False, "verbose": 0, "callbacks": [timer]}


def plain_epochs(
    fit: Callable[..., Any], model: Any, data: RepeatedBatch, clock: Clock | None = None, budget_s: float = BUDGET_S
) -> MeasuredEpochs:
    """Measure Keras' own ``fit``.

    Args:
        fit: ``keras.Model.fit`` itself.
        model: A compiled model; it is trained.
        data: Data of an epoch.
        clock: Clock of real seconds.
        budget_s: Seconds for epochs after the first; at least one is measured.
    """
    timer = EpochTimer(clock or SystemClock(), budget_s)
    fit(model, **data.arguments(timer))
    return MeasuredEpochs(data.steps, tuple(timer.seconds))


def worker_epochs(
    fit: Callable[..., Any],
    model: Any,
    data: RepeatedBatch,
    options: Options,
    alone: StepTime,
    clock: Clock | None = None,
) -> MeasuredWorker:
    """Measure one worker process with one shard process, of a server of their own on this machine.

    Args:
        fit: ``keras.Model.fit`` itself.
        model: The script's model; it is trained.
        data: Data of an epoch.
        options: Options of the script's session, of which only timeouts are taken.
        alone: Step time of a gradient measured alone.
        clock: Clock of real seconds.

    Raises:
        NfdtError: the model cannot be distributed.
    """
    timer = EpochTimer(clock or SystemClock(), BUDGET_S)
    session = replace(
        Options(resolve_algorithm(DEFAULT_PRESET), ClusterSpec(workers=1)),
        start_timeout_s=options.start_timeout_s,
        step_timeout_s=options.step_timeout_s,
        evaluate="false",
    )
    with quiet_start(), Session(session) as opened:
        history = opened.fit(fit, model, (), data.arguments(timer))
    (found,) = history.nfdt.values()
    epochs = MeasuredEpochs(data.steps, tuple(timer.seconds))
    compute_s = alone.seconds(rows_of(data.batch))
    return measured_worker(epochs, found.get("step_s", 0.0), found.get("step_exchange_s", 0.0), compute_s)
