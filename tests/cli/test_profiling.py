"""Short profiling run: on a clock that is advanced by the steps, and on a real model."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest

from nfdt.cli.profiling import MOST, WARM_UP, measure, measure_step, profile
from nfdt.model.program.pack import pack
from tests.support.clocks import ManualClock


class Machine:
    """Machine that takes ``alpha_s + beta_s * samples`` for a gradient, and much longer for the first ones."""

    def __init__(self, alpha_s, beta_s):
        self.clock, self.steps = ManualClock(), []
        self._line = (alpha_s, beta_s)

    def compute(self, samples):
        alpha_s, beta_s = self._line
        first = self.steps.count(samples) < WARM_UP
        self.steps.append(samples)
        self.clock.advance(10.0 if first else alpha_s + beta_s * samples)


@pytest.mark.parametrize(("alpha_s", "beta_s"), [(0.02, 0.001), (0.0, 0.001)])
def test_overhead_is_separated_from_the_time_of_a_sample(alpha_s, beta_s):
    machine = Machine(alpha_s, beta_s)
    line = measure_step(machine.compute, 32, machine.clock, budget_s=5.0)
    assert (line.alpha_s, line.beta_s) == (pytest.approx(alpha_s, abs=1e-9), pytest.approx(beta_s))
    assert set(machine.steps) == {32, 16}


def test_a_batch_that_takes_as_long_as_its_half_is_nearly_all_overhead():
    machine = Machine(0.1, 0.0)
    line = measure_step(machine.compute, 10, machine.clock, budget_s=5.0)
    assert line.seconds(10) == pytest.approx(0.1)
    assert line.alpha_s == pytest.approx(0.099)


def test_a_batch_of_one_sample_has_no_half():
    machine = Machine(0.1, 0.1)
    line = measure_step(machine.compute, 1, machine.clock, budget_s=5.0)
    assert (line.alpha_s, line.beta_s) == (0.0, pytest.approx(0.2))


def test_a_model_of_a_fixed_batch_size_is_measured_with_whole_batches():
    machine = Machine(0.1, 0.1)
    line = measure_step(machine.compute, 9, machine.clock, budget_s=5.0, halves=False)
    assert (line.alpha_s, line.beta_s) == (0.0, pytest.approx(1.0 / 9))
    assert set(machine.steps) == {9}
    layers = [keras.Input(batch_shape=(4, 3, 2)), keras.layers.LSTM(2, stateful=True), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    batch = (np.ones((4, 3, 2), "float32"), np.zeros((4, 1), "float32"))
    assert profile(pack(model, batch), batch, budget_s=0.01).step.alpha_s == 0


@pytest.mark.parametrize(("step_s", "budget_s", "steps"), [(0.001, 5.0, MOST), (0.5, 5.0, 10), (60.0, 5.0, 1)])
def test_the_time_is_bounded_but_for_one_step(step_s, budget_s, steps):
    clock = ManualClock()
    (took,) = measure([lambda: clock.advance(step_s)], clock, budget_s)
    assert took == pytest.approx([step_s] * steps)


def test_a_real_model_is_measured_and_left_as_it_was():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.1), "mse")
    batch = (np.ones((12, 8), "float32"), np.zeros((12, 1), "float32"))
    program = pack(model, batch)
    before = model.get_weights()
    found = profile(program, batch, budget_s=0.05)
    assert 0 < found.step.seconds(6) < found.step.seconds(12)
    assert found.apply_s > 0
    assert all(map(np.array_equal, before, model.get_weights()))
