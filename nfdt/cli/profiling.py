"""Measurements of a script's first ``fit`` on this machine: a few real gradients and updates, and short epochs.

Epochs are those of Keras' own ``fit``, and of one real worker with one shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from nfdt_client.capture import Capture, capture
from nfdt_client.local_fit import Fallback
from nfdt_client.options import Options
from nfdt_client.program_checks import cluster_for
from nfdt_client.session import Session
from nfdt_client.training_data import Arrays

from nfdt.cli.script import Script, run_script
from nfdt.core.clock import Clock, SystemClock
from nfdt.core.errors import UsageError
from nfdt.core.host.startup import quiet_start
from nfdt.core.specs.job import ClusterSpec, resolve_algorithm
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.model.backends.embedding import zero_rows
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals.models import has_no_rows
from nfdt.model.program.building import build_model
from nfdt.model.program.dry_run import without_updates
from nfdt.model.program.optimizer import state_bytes, trained_bytes
from nfdt.model.program.pack import PackedProgram, pack
from nfdt.model.program.state import load_state
from nfdt.model.program.unpack import unpack
from nfdt.model.training.host_batches import leaves, map_arrays, rows_of
from nfdt.model.training.plain_training import EpochTimer
from nfdt.model.training.steps import make_step
from nfdt.planning.calibration import (
    MeasuredEpochs,
    MeasuredWorker,
    Profile,
    ProfiledWork,
    TableWork,
    measured_worker,
)
from nfdt.schedulers.throughput import StepTime
from nfdt.shard.building import build_store
from nfdt.shard.in_process import InProcessClient

WARM_UP = 3  # of each kind: the first ones trace and compile
MOST = 50
BUDGET_S = 5.0
EPOCH_S = 1.0  # an epoch is shortened to about as much computation
ASSUMED_STEP_S = 0.02  # where no gradient can be measured before the epochs
LEAST_STEPS = 8  # of an epoch, where the script's has as many: the coordinator's estimate needs some
MOST_BYTES = 256 * 2**20  # of the data
MOST_EPOCHS = 10  # after the first one
EPOCHS_BUDGET_S = 4.0


def profile(program: PackedProgram, batch: Any, *, clock: Clock | None = None, budget_s: float = BUDGET_S) -> Profile:
    """Measure a program's gradients on one of its own batches, and its updates with the default rule.

    Args:
        program: The captured model.
        batch: A pytree of arrays as ``train_step`` takes it.
        clock: Clock of real seconds.
        budget_s: Seconds for gradients after the warm-up and for updates each; at least one is made.
    """
    clock = clock or SystemClock()
    manifest, read = program.manifest, program.artifacts.__getitem__
    layout, state = manifest.layout, load_state(read(manifest.state))
    model = unpack(manifest, read, allow_code=True)
    step = make_step(model, manifest)
    gradient = np.zeros(layout.size, np.float32)

    def compute(samples: int) -> None:
        nonlocal gradient
        gradient = step(state.weights, map_arrays(lambda array: array[:samples], batch)).vector

    fixed = any(tensor.shape[0] is not None for tensor in getattr(model, "inputs", None) or ())
    line = measure_step(compute, rows_of(batch), clock, budget_s, halves=not fixed)
    algorithm = resolve_algorithm(DEFAULT_PRESET).model_copy(update={"sparse": False})
    store: Any = build_store(manifest, state, algorithm, 0, 1, workers=2)
    clients = [InProcessClient([store], layout, name) for name in ("a", "b")]
    for client in clients:
        client.pull()

    def apply() -> None:
        clients.append(clients.pop(0))  # in turn, so that every gradient is delayed and compensated
        clients[0].push(gradient, samples=rows_of(batch))

    return Profile(line, median(measure([apply], clock, budget_s)[0]))


def measure_step(
    compute: Callable[[int], None], batch_size: int, clock: Clock, budget_s: float, *, halves: bool = True
) -> StepTime:
    """Fit a line through the durations of whole and half batches.

    Args:
        compute: Computes one gradient of the given number of samples.
        batch_size: Samples of a whole batch.
        clock: Clock that measures the durations.
        budget_s: See :func:`profile`.
        halves: Whether the model takes half a batch; else all of the time counts as that of the samples.
    """
    half = batch_size // 2 if halves else 0
    if not half:
        return StepTime(0.0, median(measure([lambda: compute(batch_size)], clock, budget_s)[0]) / batch_size)
    of_wholes, of_halves = measure([lambda: compute(batch_size), lambda: compute(half)], clock, budget_s)
    whole_s = median(of_wholes)
    beta_s = (whole_s - median(of_halves)) / (batch_size - half)
    # Half a batch cannot take longer than a whole one, nor less than half as long: such measurements are noise.
    beta_s = min(max(beta_s, 0.01 * whole_s / batch_size), whole_s / batch_size)
    return StepTime(whole_s - beta_s * batch_size, beta_s)


def measure(actions: list[Callable[[], None]], clock: Clock, budget_s: float) -> list[list[float]]:
    """Return the seconds of each action; they run in turn, so that other load on the machine slows all of them."""
    for _ in range(WARM_UP):
        for action in actions:
            action()
    took: list[list[float]] = [[] for _ in actions]
    end = clock.now() + budget_s
    while len(took[0]) < MOST and (not took[0] or clock.now() < end):
        for action, seconds in zip(actions, took, strict=True):
            began = clock.now()
            action()
            seconds.append(clock.now() - began)
    return took


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
        x, y, sample_weight = keras_data.unpack_batch(data)
        names = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": rows_of(self.batch)}
        return {**names, "epochs": 1 + MOST_EPOCHS, "shuffle": False, "verbose": 0, "callbacks": [timer]}


def plain_epochs(
    fit: Callable[..., Any],
    model: Any,
    data: RepeatedBatch,
    clock: Clock | None = None,
    budget_s: float = EPOCHS_BUDGET_S,
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
    fit: Callable[..., Any], model: Any, data: RepeatedBatch, options: Options, alone: StepTime
) -> MeasuredWorker:
    """Measure one worker process with one shard process, of a server of their own on this machine.

    Args:
        fit: ``keras.Model.fit`` itself.
        model: The script's model; it is trained.
        data: Data of an epoch.
        options: Options of the script's session, of which only timeouts are taken.
        alone: Step time of a gradient measured alone.

    Raises:
        NfdtError: the model cannot be distributed.
    """
    timer = EpochTimer(SystemClock(), EPOCHS_BUDGET_S)
    session = replace(
        Options(algorithm=resolve_algorithm(DEFAULT_PRESET), cluster=ClusterSpec(workers=1)),
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


def table_work(model: Any, batch: Any) -> TableWork:
    """Return the size of those tables of a built model that shards make, and of the rows that a batch looks up.

    Raises:
        CaptureError: the numbers of the rows depend on more than the batch.
    """
    made = [index for index, variable in enumerate(model.trainable_variables) if has_no_rows(variable)]
    if not made:
        return TableWork()
    from nfdt.model.backends.lookups import LookedUpTable, LookedUpTables, layer_of  # imports TensorFlow

    tables = LookedUpTables([LookedUpTable(layer_of(model, index)) for index in made], padded=False)
    with zero_rows(), without_updates(model):
        numbers = tables.numbers_of(model.train_step)(batch)
    variables = [model.trainable_variables[index] for index in made]
    row_bytes = sum(4 * each.size * (table.width + 1) for each, table in zip(numbers, tables.tables, strict=True))
    weights = sum(int(math.prod(variable.shape)) for variable in variables)
    return TableWork(weights, trained_bytes(model, variables), row_bytes)


def not_alone(expected: int, received: int) -> UsageError:
    """Return the error of a model that trains on another number of workers than described, which a warning explains."""
    return UsageError(f"workers: expected {expected}, for the reason above. Received: {received}.")


class FitCaptured(BaseException):
    """Exception that leaves the user's script at its first fit; ``except Exception`` does not catch it."""

    def __init__(self, work: ProfiledWork) -> None:
        super().__init__("the first fit is seen")
        self.work = work


class FitProbe(Session):
    """A session that only captures the first fit.

    Args:
        options: Options of the session; no server is used.
        profiled: Whether to measure the duration of the model's steps on this machine.
    """

    warns_if_idle = False

    def __init__(self, options: Options, *, profiled: bool) -> None:
        super().__init__(replace(options, data="client", evaluate="false", fallback="error", keep_runs=0))
        self._profiled = profiled

    def _open(self, undo: ExitStack) -> None:
        """Do nothing; there is no server."""

    def fit(self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Capture the fit; ``original`` is Keras' own."""
        self._original = original
        return super().fit(original, model, args, kwargs)

    def _fit(self, model: Any, arguments: dict[str, Any], fallback: Fallback) -> Any:
        captured = capture(model, arguments, self.options)
        batch = captured.train.first()
        asked = self.options.cluster
        if (cluster := cluster_for(model, self.options.algorithm, asked)).workers != asked.workers:
            raise not_alone(cluster.workers, asked.workers)
        if not model.built:
            build_model(model, batch)
        weights = sum(int(math.prod(v.shape)) for v in model.trainable_variables)
        samples = self._samples(captured, batch)
        # Without a profile nothing is copied: the model may be as large as the memory.
        tables = table_work(model, batch)
        measured = self._measured(model, batch, samples, tables) if self._profiled else None
        raise FitCaptured(ProfiledWork(rows_of(batch), samples, weights, measured, state_bytes(model), tables))

    def _measured(self, model: Any, batch: Any, samples: int, tables: TableWork) -> Profile:
        if tables.weights:
            return self._measured_on_shards(model, batch, samples)
        program = pack(model, batch)
        found = profile(program, batch)
        rows = rows_of(batch)
        data = RepeatedBatch.of(batch, -(-samples // rows), found.step.seconds(rows))
        if data is None:
            return found
        copy = unpack(program.manifest, program.artifacts.__getitem__, allow_code=True)
        before = plain_epochs(self._original, copy, data)
        worker = worker_epochs(self._original, model, data, self.options, found.step)
        after = plain_epochs(self._original, copy, data)  # other load may come and go
        return replace(found, plain=before + after, worker=worker)

    def _measured_on_shards(self, model: Any, batch: Any, samples: int) -> Profile:
        """Measure one worker and one shard only: a gradient needs rows, which this process does not have.

        Raises:
            UsageError: the data are no dense arrays, of which a short epoch can be made.
        """
        rows = rows_of(batch)
        data = RepeatedBatch.of(batch, -(-samples // rows), ASSUMED_STEP_S)
        if data is None:
            raise UsageError(
                "plan: expected dense arrays, to measure a worker for a model with nfdt.Embedding. Received: others. "
                "Describe the workers: --cluster FILE."
            )
        worker = worker_epochs(self._original, model, data, self.options, StepTime(0.0, 0.0))
        return Profile(StepTime(0.0, worker.compute_s / rows), 0.0, worker=worker)

    @staticmethod
    def _samples(captured: Capture, batch: Any) -> int:
        if not isinstance(captured.train, Arrays):
            if captured.train.batches is None:
                raise UsageError("plan: expected data whose length is known. Received: an endless stream.")
            return captured.train.batches * rows_of(batch)
        train, steps = captured.train, captured.steps_per_epoch
        return train.samples if steps is None else min(train.samples, steps * train.batch_size)


def first_fit(script: Script, options: Options, *, profiled: bool = False) -> ProfiledWork | None:
    """Run a script up to its first ``fit``, and if ``profiled`` a few of its steps; return None without a ``fit``."""
    try:
        with FitProbe(options, profiled=profiled):
            run_script(script)
    except FitCaptured as captured:
        return captured.work
    return None
