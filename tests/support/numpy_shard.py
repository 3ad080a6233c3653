"""Published formulas of three rules in plain NumPy, independent of the code they check."""

from __future__ import annotations

import numpy as np


class NumpyShard:
    """Shard in plain NumPy; a push carries the weights of its gradient and the number of missed updates.

    ``rule`` is ``plain`` (SGD, with Keras' momentum), ``dc`` (constant strength 0.04) or ``ddc`` (SGD), which judges a
    unit's weights together: a column of a kernel, a bias.
    """

    def __init__(self, rule, weights, momentum=0.0, shapes=None):
        self.w = weights
        self.momentum = momentum
        self.move = getattr(self, f"_{rule}")
        self.velocity = self.reserve = self.steps = np.zeros_like(weights)
        self.unit = np.concatenate(list(units(shapes or [weights.shape])))
        self.mean_delay, self.updates = 0.0, 0

    def push(self, gradient, held, tau, rate):
        """Apply a push; return the weights of the answer."""
        reply = self.move(gradient, self.w - held, tau, rate)
        self.updates += 1
        return reply

    def _plain(self, g, d, tau, rate):
        self.velocity = self.momentum * self.velocity - rate * g
        self.w = self.w + self.velocity
        return self.w

    def _dc(self, g, d, tau, rate):
        return self._plain(g + 0.04 * g * g * d, d, tau, rate)

    def _ddc(self, g, d, tau, rate):
        mu, beta = self.momentum, 0.9 if self.updates < 50 else 0.99
        self.mean_delay = beta * self.mean_delay + (1 - beta) * tau if self.updates else tau
        typical = np.sqrt(self.steps) + 1e-10
        change = np.clip(0.2 * self.total(g * d) / (np.sqrt(self.total(g * g)) * typical + 1e-30), -1, 1)
        harmless = typical + np.sqrt(self.total(self.w * self.w)) / 30
        gc = g * (1 + change) / (1 + np.sqrt(self.total(d * d)) / harmless)
        m = mu ** (1 / (1 + self.mean_delay))
        step = (1 - m) * self.reserve + rate * gc
        self.reserve = m * self.reserve + rate * mu / (1 - mu) * gc
        self.w = self.w - step
        self.steps = 0.99 * self.steps + 0.01 * self.total(step * step)
        return self.w - (1 - m**tau) * self.reserve

    def total(self, v):
        """Return for each element the sum over the elements of its unit."""
        return np.array([v[self.unit == unit].sum() for unit in self.unit])


def units(shapes):
    """Return the unit that each element leads into, by variable; no kernel has more than 16 rows here."""
    first = 0
    for shape in shapes:
        columns = shape[-1] if len(shape) > 1 else 1
        yield first + np.arange(np.prod(shape)) % columns
        first += columns


def ahead(rule, weights, gradients, overlap, momentum, rate, shapes=None):
    """Run one worker that computes each gradient ``overlap`` answers behind.

    Returns (staleness, all answers, final weights).
    """
    shard = NumpyShard(rule, np.float64(weights), momentum, shapes)
    answers = [(np.float64(weights), 0)]
    staleness = []
    for step, g in enumerate(gradients):
        held, version = answers[max(0, step - overlap)]
        staleness.append(step - version)
        g = g(held) if callable(g) else np.float64(g)
        answers.append((shard.push(g, held, staleness[-1], rate), step + 1))
    return staleness, np.array([weights for weights, _ in answers[1:]]), shard.w
