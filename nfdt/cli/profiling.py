"""Short profiling run: a few real gradients and updates of a captured model on this machine."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from nfdt.cli.work import Profile
from nfdt.core.clock import Clock, SystemClock
from nfdt.core.program import unpack
from nfdt.core.program.pack import PackedProgram
from nfdt.core.program.state import load_state
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import DEFAULT_PRESET
from nfdt.core.training.host_batches import map_arrays, rows_of
from nfdt.core.training.steps import make_step
from nfdt.schedulers import StepTime
from nfdt.shard.building import build_store
from nfdt.shard.in_process import InProcessClient

WARM_UP = 3  # of each kind: the first ones trace and compile
MOST = 50
BUDGET_S = 5.0


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
    model = unpack.unpack(manifest, read, allow_code=True)
    step = make_step(model, manifest)
    gradient = np.zeros(layout.size, np.float32)

    def compute(samples: int) -> None:
        nonlocal gradient
        gradient = np.asarray(step(state.weights, map_arrays(lambda array: array[:samples], batch)).gradient)

    line = measure_step(compute, rows_of(batch), clock, budget_s)
    algorithm = resolve_algorithm(DEFAULT_PRESET).model_copy(update={"sparse": False})
    store: Any = build_store(manifest, state, algorithm, 0, 1, workers=2)
    clients = [InProcessClient([store], layout, name) for name in ("a", "b")]
    for client in clients:
        client.pull()

    def apply() -> None:
        clients.append(clients.pop(0))  # in turn, so that every gradient is delayed and compensated
        clients[0].push(gradient, samples=rows_of(batch))

    return Profile(line, median(measure([apply], clock, budget_s)[0]))


def measure_step(compute: Callable[[int], None], batch_size: int, clock: Clock, budget_s: float) -> StepTime:
    """Fit a line through the durations of whole and half batches.

    Args:
        compute: Computes one gradient of the given number of samples.
        batch_size: Samples of a whole batch.
        clock: Clock that measures the durations.
        budget_s: See :func:`profile`.
    """
    half = batch_size // 2
    if not half:
        return StepTime(0.0, median(measure([lambda: compute(1)], clock, budget_s)[0]))
    wholes, halves = measure([lambda: compute(batch_size), lambda: compute(half)], clock, budget_s)
    whole_s = median(wholes)
    beta_s = (whole_s - median(halves)) / (batch_size - half)
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
