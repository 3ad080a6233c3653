"""DC-ASGD and its variants: comparison with numbers computed by hand, and limiting cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, Push, make_rule
from nfdt.update_rules.base import UpdateRule
from nfdt.update_rules.dc import DelayCompensated
from tests.support.simulated_shard import SimulatedShard

SGD = OptimizerTraits("sgd")
FINITE = st.floats(-100, 100, allow_nan=False)


def rule_of(preset, **overrides):
    return make_rule(resolve_algorithm(preset, **overrides), SGD)


def push_of(gradient, weights, backup, tau=1.0):
    arrays = (np.asarray(a, np.float64) for a in (gradient, weights, backup))
    return Push(*arrays, np.asarray(tau), np.asarray(10.0))


def corrected(rule, push):
    shard, worker = rule.init_shard(np, push.weights), rule.init_worker(np, push.weights)
    return rule.correct(np, push, shard, worker)


def test_constant_compensation_by_hand():
    # g + 0.04 g g (w - backup) = 2 + 0.04 * 4 * 0.5 and -1 + 0.04 * 1 * -2
    result = corrected(rule_of("dc-asgd"), push_of([2.0, -1.0], [1.5, 1.0], [1.0, 3.0]))
    assert result.gradient == pytest.approx([2.08, -1.08], abs=1e-12)
    assert result.learning_rate_scale == 1.0


@pytest.mark.parametrize("preset", ["dc-asgd-a", "dc-asgd-k"])
def test_adaptive_compensation_by_hand(preset):
    # MS = 0.05 * 4 = 0.2; lambda = 2 / sqrt(0.2 + 1e-7); g + lambda * 4 * 0.5
    result = corrected(rule_of(preset), push_of([2.0], [1.5], [1.0]))
    assert result.gradient == pytest.approx([2 + 4 * 0.5 * 2 / np.sqrt(0.2000001)], abs=1e-12)


@pytest.mark.parametrize("preset", ["dc-asgd-a", "dc-asgd-k"])
def test_the_mean_square_is_updated_before_it_is_used(preset):
    result = corrected(rule_of(preset, dc_decay=0.0), push_of([3.0], [2.0], [1.0]))
    # MS = g*g, so lambda g g d = 2 * |g| * d
    assert result.gradient == pytest.approx([3 + 2 * 3 * 1], rel=1e-7)


@pytest.mark.parametrize("preset", ["dc-asgd-a", "dc-asgd-k"])
def test_the_mean_square_remembers_earlier_gradients(preset):
    rule = rule_of(preset)
    first = corrected(rule, push_of([10.0], [1.0], [1.0]))
    result = rule.correct(np, push_of([1.0], [1.5], [1.0]), first.shard, first.worker)
    # MS = 0.95 * 0.05 * 100 + 0.05 * 1
    assert result.gradient == pytest.approx([1 + 0.5 * 2 / np.sqrt(4.8 + 1e-7)], abs=1e-12)


def test_dc_a_keeps_a_mean_square_per_worker_and_dc_k_one_for_all():
    adaptive, shared = (SimulatedShard(rule_of(p), np.zeros(1)) for p in ("dc-asgd-a", "dc-asgd-k"))
    received = []
    for shard in (adaptive, shared):
        for worker in "ab":
            shard.pull(worker)
        shard.push("a", np.array([10.0]), 0.1)
        shard.push("b", np.array([1.0]), 0.1)
        received.append(shard.last_gradient[0])
    # worker b: drift -1; its own MS is 0.05, the shared one is 0.95 * 5 + 0.05
    assert received[0] == pytest.approx(1 - 2 / np.sqrt(0.05 + 1e-7))
    assert received[1] == pytest.approx(1 - 2 / np.sqrt(0.95 * 5 + 0.05 + 1e-7))


def test_two_workers_are_compensated_against_their_own_backups():
    shard = SimulatedShard(rule_of("dc-asgd", dc_lambda=1.0), np.array([1.0]))
    shard.pull("a")
    shard.pull("b")
    shard.push("a", np.array([2.0]), 0.1)
    assert shard.last_gradient == pytest.approx([2.0])  # the first push of each worker has no drift of its own
    assert shard.backup("a") == pytest.approx([0.8])
    assert shard.backup("b") == pytest.approx([1.0])
    shard.push("b", np.array([1.0]), 0.1)
    assert shard.last_gradient == pytest.approx([1 + 1 * (0.8 - 1.0)])
    shard.push("a", np.array([1.0]), 0.1)
    assert shard.last_gradient == pytest.approx([1 + 1 * (0.72 - 0.8)])


@given(st.lists(FINITE, min_size=1, max_size=5), FINITE)
def test_no_strength_is_plain_asgd_bit_for_bit(gradient, drift):
    push = push_of(gradient, np.zeros(len(gradient)) + drift, np.zeros(len(gradient)))
    for preset in ("dc-asgd", "dc-asgd-a", "dc-asgd-k"):
        assert np.array_equal(corrected(rule_of(preset, dc_lambda=0.0), push).gradient, push.gradient)


@given(st.floats(0.1, 5), st.floats(-3, 3), st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_true_curvature_makes_a_delayed_quadratic_gradient_fresh(curvature, backup, moves):
    # f = 0.5 h w^2 has g = h w; with lambda g^2 replaced by h the correction is exact for every tau
    weights = backup + sum(moves)
    gradient = curvature * backup
    if abs(gradient) < 1e-3:
        return
    rule = DelayCompensated(curvature / gradient**2)
    result = corrected(rule, push_of([gradient], [weights], [backup], tau=len(moves)))
    assert result.gradient == pytest.approx([curvature * weights], rel=1e-9, abs=1e-9)


def test_a_rule_without_a_step_of_its_own_descends_the_gradient():
    state = {"kept": np.zeros(2)}
    moved = UpdateRule().advance(np, np.array([2.0, -1.0]), np.ones(2), np.asarray(0.1), np.asarray(0.0), state)
    assert moved.weights == pytest.approx([0.8, 1.1])
    assert moved.shard == state


@pytest.mark.parametrize(("tau", "scale"), [(0, 1.0), (1, 1.0), (2, 0.5), (8, 0.125)])
def test_staleness_divides_the_learning_rate(tau, scale):
    result = corrected(rule_of("n-softsync"), push_of([1.0], [0.0], [0.0], tau=float(tau)))
    assert result.learning_rate_scale == scale
    assert result.gradient == [1.0]
