"""Rules to compare with: equal to Keras without delay, and to a step computed by hand with one."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from benchmarks.workloads.reference_differences import (
    DelayedNesterov,
    DirectionCorrected,
    MomentumLookAhead,
    OuterNesterov,
)
from benchmarks.workloads.reference_gradients import DanaDelayCompensated, ElementwiseDelayed
from benchmarks.workloads.reference_rules import reference_rules
from nfdt.core.errors import UsageError
from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import make_rule
from nfdt.update_rules.base import OptimizerTraits, Push
from nfdt.update_rules.blocks import KernelBlocks

MOMENTUM, START = 0.9, np.array([1.0, -2.0])


class Shard:
    """Weights under one rule, in float64; every worker holds the initial weights at first."""

    def __init__(self, rule, workers=1, decay=0.0):
        self.rule, self.decay, self.weights, self.updates = rule, decay, START.copy(), 0
        self.state = rule.init_shard(np, self.weights)
        self.workers = [rule.init_worker(np, self.weights) for _ in range(workers)]
        self.held, self.pulled = [self.weights] * workers, [0] * workers

    def push(self, worker, gradient, rate):
        """Apply a gradient; return the weights after it, and those that the worker gets."""
        tau = np.float64(self.updates - self.pulled[worker])
        push = Push(np.asarray(gradient), self.weights, self.held[worker], tau, np.float64(self.updates))
        made = self.rule.correct(np, push, self.state, self.workers[worker])
        decay = self.decay * self.weights if self.decay else None
        advance = self.rule.advance(np, made.gradient, self.weights, rate, push.updates, made.shard, decay)
        self.weights, self.state, self.workers[worker] = advance.weights, advance.shard, made.worker
        self.updates += 1
        self.held[worker] = self.rule.reply(np, self.weights, rate, tau, self.state)
        self.pulled[worker] = self.updates
        return self.weights, self.held[worker]


def keras_weights(gradients, rates, **options):
    """Return the weights of Keras' SGD after each step."""
    variable = keras.Variable(START, dtype="float64")
    optimizer = keras.optimizers.SGD(rates[0], momentum=MOMENTUM, **options)
    optimizer.build([variable])
    found = []
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.learning_rate = rate
        optimizer.apply([keras.ops.convert_to_tensor(gradient, "float64")])
        found.append(variable.numpy())
    return np.array(found)


GRADIENTS = np.random.default_rng(0).normal(size=(8, 2))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_elementwise_ddc_without_delay_is_sgd_with_momentum(decay):
    shard, rates = Shard(ElementwiseDelayed(MOMENTUM), decay=decay), np.linspace(0.2, 0.05, 8)
    found = [shard.push(0, gradient, rate)[0] for gradient, rate in zip(GRADIENTS, rates, strict=True)]
    expected = keras_weights(GRADIENTS, rates, weight_decay=decay or None)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_dana_with_one_worker_is_nesterov():
    shard, rates = Shard(DanaDelayCompensated(MOMENTUM, dc_lambda=0.0)), [0.1] * 8
    found = [shard.push(0, gradient, 0.1)[1] for gradient in GRADIENTS]
    np.testing.assert_allclose(found, keras_weights(GRADIENTS, rates, nesterov=True), rtol=1e-6)


def test_elementwise_ddc_follows_its_published_steps():
    """Compare with steps of three workers that all pulled at first, computed apart from this code."""
    shard = Shard(ElementwiseDelayed(MOMENTUM), workers=3)
    steps = [
        (0, (0.5, -0.25), 0.1, (0.95, -1.975), (0.95, -1.975)),
        (1, (0.4, 0.1), 0.1, (0.9088978199, -1.9577822434), (0.8715498381, -1.9418483979)),
        (0, (0.3, -0.2), 0.1, (0.8742511318, -1.9430008563), (0.8425401232, -1.9294719242)),
        (2, (-0.1, 0.2), 0.05, (0.8494225788, -1.9340701658), (0.7838693828, -1.9089952610)),
        (1, (0.2, 0.2), 0.05, (0.8275703536, -1.9329835543), (0.7882972104, -1.9259259892)),
        (2, (0.3, 0.1), 0.05, (0.7997453438, -1.9296769440), (0.7767130210, -1.9264745197)),
    ]
    for worker, gradient, rate, weights, reply in steps:
        found = shard.push(worker, gradient, rate)
        np.testing.assert_allclose(found[0], weights, rtol=1e-9)
        np.testing.assert_allclose(found[1], reply, rtol=1e-9)


def test_dana_dc_follows_its_equations():
    shard = Shard(DanaDelayCompensated(0.5), workers=2, decay=0.1)
    weights, ahead = shard.push(0, [1.0, -1.0], 0.1)
    np.testing.assert_allclose(weights, [0.89, -1.88])  # v = g; 0.1 v, and 0.1 * 0.1 of the weights
    np.testing.assert_allclose(ahead, [0.84, -1.83])  # 0.1 * 0.5 * v further
    weights, ahead = shard.push(1, [2.0, 0.0], 0.1)
    np.testing.assert_allclose(weights[0], 0.89 - 0.1 * (2.0 + 2.0 * 4.0 * (0.89 - 1.0)) - 0.01 * 0.89)
    np.testing.assert_allclose(ahead[0], weights[0] - 0.1 * 0.5 * (1.0 + 2.0 - 0.88))
    np.testing.assert_allclose(ahead[1] - weights[1], 0.05)  # the other worker's momentum alone
    weights, _ = shard.push(0, [0.0, 0.0], 0.0)
    np.testing.assert_allclose(shard.workers[0]["velocity"], [0.5, -0.5])


@pytest.mark.parametrize("rule", [OuterNesterov, DelayedNesterov])
def test_outer_momentum_of_one_worker_is_nesterov(rule):
    shard = Shard(rule(1))
    found = [shard.push(0, difference, 1.0)[0] for difference in GRADIENTS]
    np.testing.assert_allclose(found, keras_weights(GRADIENTS, [0.7] * 8, nesterov=True), rtol=1e-6)


def test_delayed_nesterov_uses_its_momentum_once_in_a_round():
    shard = Shard(DelayedNesterov(2), workers=2)
    weights, _ = shard.push(0, [1.0, 0.0], 1.0)
    np.testing.assert_allclose(weights, START - [0.35, 0.0])  # .7 D / 2
    weights, _ = shard.push(1, [0.0, 1.0], 1.0)
    np.testing.assert_allclose(weights, START - [0.35 + 0.7 * 0.9 * 0.5, 0.35 + 0.7 * 0.9 * 0.5])
    weights, _ = shard.push(1, [0.0, 0.0], 1.0)
    np.testing.assert_allclose(weights, shard.held[1])
    np.testing.assert_allclose(shard.state["velocity"], [0.5, 0.5])


def test_momentum_look_ahead_follows_its_equations():
    shard = Shard(MomentumLookAhead(4), workers=2)
    weights, ahead = shard.push(0, [2.0, 0.0], 1.0)
    np.testing.assert_allclose(weights, START - [0.7 * (1.0 + 0.9 * 0.1), 0.0])  # D / sqrt(4), v = .1 u
    np.testing.assert_allclose(ahead, weights - [0.7 * 0.9 * 0.1, 0.0])


@pytest.mark.parametrize(
    ("difference", "corrected"),
    [
        ([3.0, 4.0], [3.0, 4.0]),  # cosine .6: stays
        ([-3.0, 4.0], [-3.0 + 0.5 * 0.6 * 0.625 * 0.6 * 5.0, 4.0]),  # cosine -.6, q = 5/8
        ([0.0, 5.0], [5.0 * 0.625 / np.hypot(0.625, 0.375), 5.0 * 0.375 / np.hypot(0.625, 0.375)]),  # cosine 0
    ],
)
def test_heloco_corrects_what_opposes_the_momentum(difference, corrected):
    rule = DirectionCorrected(1, [0, 2])
    push = Push(np.array([*difference, 7.0]), np.zeros(3), np.zeros(3), np.float64(0), np.float64(0))
    momentum = np.array([1.0, 0.0, 0.0])
    made = rule.correct(np, push, {"velocity": momentum}, {})
    velocity = 0.9 * momentum + 0.1 * (counted := np.array([*corrected, 7.0]))
    np.testing.assert_allclose(
        made.gradient, 0.7 * (counted + 0.9 * velocity), rtol=1e-6
    )  # the last tensor has no momentum yet


def test_rules_of_differences_are_for_local_steps():
    blocks = KernelBlocks([(4, 3), (3,)], [False, False])
    with reference_rules():
        for name in ("local-nesterov", "delayed-nesterov", "momentum-look-ahead", "heloco"):
            algorithm = resolve_algorithm("local-ddc", update_rule=name)
            assert make_rule(algorithm, OptimizerTraits(), blocks, workers=4).workers == 4
            with pytest.raises(UsageError, match="heloco: expected blocks of kernels"):
                make_rule(resolve_algorithm("local-ddc", update_rule="heloco"), OptimizerTraits(), workers=4)


def test_the_rules_are_for_sgd():
    with reference_rules():
        algorithm = resolve_algorithm("asgd", update_rule="dana-dc")
        assert make_rule(algorithm, OptimizerTraits(kind="sgd", momentum=0.5)).momentum == 0.5
        for traits in (OptimizerTraits(kind="adam"), OptimizerTraits(kind="sgd", momentum=0.9, nesterov=True)):
            with pytest.raises(UsageError, match="expected SGD"):
                make_rule(algorithm, traits)
