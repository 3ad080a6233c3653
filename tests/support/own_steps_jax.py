"""Models with a ``train_step`` of their own, for Keras on JAX."""

from __future__ import annotations

import jax
import keras


class OwnStep(keras.Model):
    updates = 1

    def train_step(self, state, data):
        trainable, untrained, own, metrics = state
        x, y = data

        def loss_of(trainable):
            prediction, changed = self.stateless_call(trainable, untrained, x, training=True)
            return keras.ops.mean((prediction - y) ** 2), changed

        (loss, untrained), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        for _ in range(self.updates):
            trainable, own = self.optimizer.stateless_apply(own, gradients, trainable)
        return {"loss": loss}, (trainable, untrained, own, metrics)


class NoUpdate(OwnStep):
    updates = 0


class TwoUpdates(OwnStep):
    updates = 2
