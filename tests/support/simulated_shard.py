"""Shard in a few lines of NumPy, which calls an update rule in the same order as the real one."""

from collections.abc import Callable

import numpy as np

from nfdt.update_rules import Push, UpdateRule

Optimizer = Callable[[np.ndarray, np.ndarray, float], np.ndarray]


def plain_sgd(weights, gradient, rate):
    return weights - rate * gradient


class SimulatedShard:
    """Weights, version, backups and state of one shard; ``optimizer`` is the user's own, before its decay."""

    def __init__(
        self,
        rule: UpdateRule,
        weights: np.ndarray,
        optimizer: Optimizer = plain_sgd,
        updates: int = 0,
        weight_decay: float = 0.0,
    ):
        self.weight_decay = weight_decay
        self.rule = rule
        self.weights = weights
        self.optimizer = optimizer
        self.state = rule.init_shard(np, weights)
        self.version = updates
        self.last_staleness = 0
        self.last_gradient = np.zeros_like(weights)
        self._backups: dict = {}
        self._pulled: dict = {}
        self._workers: dict = {}

    def enter(self, **slots):
        self.state = self.rule.enter(np, slots, self._scalar(self.version), self.state)

    def leave(self):
        return self.rule.leave(np, self.state)

    def pull(self, worker):
        self._workers.setdefault(worker, self.rule.init_worker(np, self.weights))
        return self._hand_out(worker, self.weights)

    def push(self, worker, gradient, rate):
        tau = self._scalar(self.version - self._pulled[worker])
        push = Push(gradient, self.weights, self._backups[worker], tau, self._scalar(self.version))
        correction = self.rule.correct(np, push, self.state, self._workers[worker])
        self._workers[worker] = correction.worker
        self.last_staleness = int(tau)
        self.last_gradient = correction.gradient
        self._apply(correction, self._scalar(rate) * correction.learning_rate_scale)
        reply = self.rule.reply(np, self.weights, self._scalar(rate), tau, self.state, self._decay())
        return self._hand_out(worker, reply)

    def backup(self, worker):
        return self._backups[worker]

    def _apply(self, correction, rate):
        if self.rule.owns_optimizer:
            updates = self._scalar(self.version)
            advance = self.rule.advance(
                np, correction.gradient, self.weights, rate, updates, correction.shard, self._decay()
            )
            self.weights, self.state = advance.weights, advance.shard
        else:
            decay = self._decay()
            if decay is None:
                decayed = self.weights
            else:
                taken = self.rule.lessened(np, decay, correction.shard) if self.rule.lessens_decay else decay
                decayed = self.weights - rate * taken
            after = self.optimizer(decayed, correction.gradient, rate)
            self.state = self.rule.observe(np, self.weights, after, correction.shard)
            self.weights = after
        self.version += 1

    def _hand_out(self, worker, weights):
        self._backups[worker] = weights
        self._pulled[worker] = self.version
        return weights

    def _decay(self):
        return self.weight_decay * self.weights if self.weight_decay else None

    def _scalar(self, value):
        return np.asarray(value, self.weights.dtype)
