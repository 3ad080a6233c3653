"""Models with a ``train_step`` of their own, for Keras on PyTorch."""

from __future__ import annotations

import keras
import torch


class OwnStep(keras.Model):
    updates = 1

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ((self(x, training=True) - y) ** 2).mean()
        loss.backward()
        variables = self.trainable_variables
        with torch.no_grad():
            for _ in range(self.updates):
                self.optimizer.apply([variable.value.grad for variable in variables], variables)
        return {"loss": loss}


class NoUpdate(OwnStep):
    updates = 0


class TwoUpdates(OwnStep):
    updates = 2
