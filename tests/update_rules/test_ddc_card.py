"""DDC-ASGD under delay, compared with the formulas of its card in independent code."""

import numpy as np
import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.update_rules import OptimizerTraits, make_rule
from nfdt.update_rules.blocks import KernelBlocks
from nfdt.update_rules.reliability import mean_delay
from tests.support.simulated_shard import SimulatedShard

SIZE, WORKERS = 5, 4


def rule_of(optimizer):
    return make_rule(resolve_algorithm("ddc-asgd"), OptimizerTraits(optimizer), KernelBlocks([(SIZE,)], [False]))


class AdamCard:
    """Weights of the shard and of each worker by the formulas of the card."""

    beta_1, beta_2, epsilon = 0.9, 0.999, 1e-7

    def __init__(self, weights):
        self.w, self.t, self.tbar, self.s, self.bias = weights.copy(), 0, 0.0, 0.0, 0.0
        self.reserve, self.v = np.zeros(SIZE), np.zeros(SIZE)
        self.sent = {i: (weights.copy(), 0) for i in range(WORKERS)}

    def trusted(self, g, d):
        """Return the compensated gradient, scaled by its trust under the drift."""
        typical = np.sqrt(self.s) + 1e-10
        c = np.clip(0.2 * (g @ d) / (np.linalg.norm(g) * typical + 1e-30), -1, 1)
        return g * (1 + c) / (1 + np.linalg.norm(d) / (typical + np.linalg.norm(self.w) / 30))

    def push(self, worker, g, rate):
        """Apply a push and return the weights of the answer."""
        held, pulled = self.sent[worker]
        tau, decay = self.t - pulled, 0.9 if self.t < 50 else 0.99
        self.tbar = tau if self.t == 0 else decay * self.tbar + (1 - decay) * tau
        gc = self.trusted(g, self.w - held)
        m = self.beta_1 ** (1 / (1 + self.tbar))
        self.v = self.beta_2 * self.v + (1 - self.beta_2) * gc * gc
        den = (np.sqrt(self.v) + self.epsilon) / np.sqrt(1 - self.beta_2 ** (self.t + 1))
        b = (1 - m) * self.bias + (1 - self.beta_1)
        self.bias = m * self.bias + self.beta_1
        dw = rate * ((1 - m) * self.reserve + (1 - self.beta_1) * gc) / (b * den)
        self.reserve = m * self.reserve + self.beta_1 * gc
        self.w = self.w - dw
        self.s = 0.99 * self.s + 0.01 * (dw @ dw)
        self.t += 1
        self.sent[worker] = (self.w - rate * (1 - m**tau) * self.reserve / (b * den), self.t)
        return self.sent[worker][0]


def test_adam_follows_the_card_at_every_delay():
    rng = np.random.default_rng(0)
    start = rng.normal(size=SIZE)
    card, shard = AdamCard(start), SimulatedShard(rule_of("adam"), start.copy())
    for worker in range(WORKERS):
        shard.pull(worker)
    for step in range(300):
        worker, gradient, rate = int(rng.integers(WORKERS)), rng.normal(size=SIZE), 0.01 * (1 + step % 3)
        np.testing.assert_allclose(shard.push(worker, gradient, rate), card.push(worker, gradient, rate), rtol=1e-9)
        np.testing.assert_allclose(shard.weights, card.w, rtol=1e-9)


def test_the_steps_of_an_unknown_optimizer_are_measured():
    shard = SimulatedShard(rule_of("other"), np.ones(SIZE))
    shard.pull("a")
    shard.push("a", np.full(SIZE, 2.0), 0.1)
    assert float(np.sum(shard.state["step_square"])) == pytest.approx(0.01 * SIZE * 0.2**2)


def test_the_mean_delay_begins_with_the_first_delay():
    assert mean_delay(np, np.asarray(0.0), np.asarray(7.0), np.asarray(0.0)) == 7.0
    assert mean_delay(np, np.asarray(7.0), np.asarray(3.0), np.asarray(1.0)) == pytest.approx(6.6)
