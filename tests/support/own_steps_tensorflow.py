"""Models with a ``train_step`` of their own, for Keras on TensorFlow."""

from __future__ import annotations

import keras
import tensorflow as tf


class OwnStep(keras.Model):
    updates = 1

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        for _ in range(self.updates):
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class NoUpdate(OwnStep):
    updates = 0


class TwoUpdates(OwnStep):
    updates = 2
