"""Keras' update formulas in NumPy, as oracles; each keeps the same slot variables as Keras."""

import math

import numpy as np


class SGD:
    def __init__(self, momentum=0.0, nesterov=False):
        self.momentum, self.nesterov, self.velocity = momentum, nesterov, None

    def __call__(self, weights, gradient, rate):
        if self.velocity is None:
            self.velocity = np.zeros_like(weights)
        if not self.momentum:
            return weights - gradient * rate
        self.velocity = self.momentum * self.velocity - gradient * rate
        if self.nesterov:
            return weights + self.momentum * self.velocity - gradient * rate
        return weights + self.velocity


class Adam:
    def __init__(self, beta_1=0.9, beta_2=0.999, epsilon=1e-7, decay=0.0):
        self.beta_1, self.beta_2, self.epsilon, self.decay = beta_1, beta_2, epsilon, decay
        self.step, self.m, self.v = 0, 0.0, 0.0

    def __call__(self, weights, gradient, rate):
        weights = weights - weights * self.decay * rate
        self.step += 1
        alpha = rate * math.sqrt(1 - self.beta_2**self.step) / (1 - self.beta_1**self.step)
        self.m = self.m + (gradient - self.m) * (1 - self.beta_1)
        self.v = self.v + (gradient**2 - self.v) * (1 - self.beta_2)
        return weights - self.m * alpha / (np.sqrt(self.v) + self.epsilon)


class RMSprop:
    def __init__(self, rho=0.9, epsilon=1e-7):
        self.rho, self.epsilon, self.square = rho, epsilon, 0.0

    def __call__(self, weights, gradient, rate):
        self.square = self.rho * self.square + (1 - self.rho) * gradient**2
        return weights - rate * gradient / np.sqrt(self.square + self.epsilon)
