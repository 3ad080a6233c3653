"""Models whose ``train_step`` is more than one update of every variable by one optimizer, as in Keras' examples."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

NOISE = 3


def points(rows=64):
    """Return points of a plane near two places."""
    random = np.random.default_rng(4)
    places = np.where(random.random((rows, 1)) < 0.5, [[2.0, 0.0]], [[0.0, 1.0]])
    return (places + 0.1 * random.normal(size=(rows, 2))).astype("float32")


def dense(inputs, outputs, name):
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(8, activation="tanh"), layers.Dense(outputs)], name=name
    )


class Gan(keras.Model):
    """A DCGAN in small: both losses see the same weights, but the generator's sees the updated discriminator."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = dense(2, 1, "discriminator"), dense(NOISE, 2, "generator")
        self.random = keras.random.SeedGenerator(7)
        self.d_metric, self.g_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_metric, self.g_metric]

    def noise(self, like):
        return keras.random.normal((keras.ops.shape(like)[0], NOISE), seed=self.random)

    def train_step(self, real):
        made = self.generator(self.noise(real))
        ones = keras.ops.ones((keras.ops.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            found = self.discriminator(keras.ops.concatenate([made, real], 0))
            d_loss = self.loss_fn(keras.ops.concatenate([ones, 0 * ones], 0), found)
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_weights, strict=True))
        noise = self.noise(real)
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(0 * ones, self.discriminator(self.generator(noise)))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_weights, strict=True))
        self.d_metric.update_state(d_loss)
        self.g_metric.update_state(g_loss)
        return {"d_loss": self.d_metric.result(), "g_loss": self.g_metric.result()}


class WassersteinGan(Gan):
    """A WGAN-GP in small: the discriminator's optimizer steps three times before the generator's."""

    d_steps, penalty_weight = 3, 10.0

    def penalty(self, real, made):
        alpha = keras.random.uniform((keras.ops.shape(real)[0], 1), seed=self.random)
        between = real + alpha * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            found = self.discriminator(between, training=True)
        norm = keras.ops.sqrt(keras.ops.sum(tape.gradient(found, between) ** 2, 1) + 1e-6)
        return keras.ops.mean((norm - 1.0) ** 2)

    def train_step(self, real):
        for _ in range(self.d_steps):
            noise = self.noise(real)
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                cost = keras.ops.mean(self.discriminator(made)) - keras.ops.mean(self.discriminator(real))
                d_loss = cost + self.penalty_weight * self.penalty(real, made)
            gradients = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_variables, strict=True))
        noise = self.noise(real)
        with tf.GradientTape() as tape:
            g_loss = -keras.ops.mean(self.discriminator(self.generator(noise, training=True)))
        gradients = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gradients, self.generator.trainable_variables, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


class ActorCritic(keras.Model):
    """Two losses and two optimizers in a dictionary, over variables of their own; nothing is sampled."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = dense(2, 2, "actor"), dense(2, 1, "critic")

    def compile(self, **optimizers):
        super().compile(optimizer=None)
        self.optimizers = optimizers

    def train_step(self, state):
        reward = keras.ops.sum(state, 1, keepdims=True)
        with tf.GradientTape(persistent=True) as tape:
            value, action = self.critic(state), keras.ops.softmax(self.actor(state))
            advantage = tf.stop_gradient(reward - value)
            losses = {
                "critic": keras.ops.mean((reward - value) ** 2),
                "actor": -keras.ops.mean(keras.ops.log(action[:, :1]) * advantage),
            }
        for name, loss in losses.items():
            weights = getattr(self, name).trainable_variables
            self.optimizers[name].apply(tape.gradient(loss, weights), weights)
        return losses


class Diffusion(keras.Model):
    """One optimizer for a network, and a moving average of the network that the step assigns, as in DDIM."""

    def __init__(self):
        super().__init__()
        self.normalizer, self.network = layers.Normalization(), dense(2, 2, "network")
        self.ema_network = keras.models.clone_model(self.network)
        self.random = keras.random.SeedGenerator(5)

    def train_step(self, images):
        images = self.normalizer(images)
        noises = keras.random.normal(keras.ops.shape(images), seed=self.random)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((noises - self.network(images + noises)) ** 2)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        for weight, average in zip(self.network.weights, self.ema_network.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {"noise_loss": loss}


class Autoencoder(keras.Model):
    """Keras' own step, with a loss of its outputs and inputs."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = dense(2, 2, "encoder"), dense(2, 2, "decoder")

    def call(self, inputs):
        outputs = self.decoder(self.encoder(inputs))
        self.add_loss(keras.ops.mean((outputs - inputs) ** 2))
        return outputs


def adam(rate=0.01):
    return keras.optimizers.Adam(rate, beta_1=0.5, beta_2=0.9)


def gan(kind=Gan, d_optimizer=None, g_optimizer=None):
    """Return a compiled GAN."""
    keras.utils.set_random_seed(3)
    model = kind()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(d_optimizer or adam(), g_optimizer or adam(), loss)
    return model


def wasserstein():
    """Return a compiled WGAN-GP; its generator's optimizer is SGD with momentum."""
    return gan(WassersteinGan, adam(), keras.optimizers.SGD(0.01, momentum=0.9))


def actor_critic():
    """Return a compiled actor with its critic."""
    keras.utils.set_random_seed(3)
    model = ActorCritic()
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.8)
    model.compile(actor=keras.optimizers.SGD(decay), critic=keras.optimizers.Adam(0.01, clipnorm=0.5))
    return model


def diffusion():
    """Return a compiled, adapted diffusion model."""
    keras.utils.set_random_seed(3)
    model = Diffusion()
    model.normalizer.adapt(points())
    model.compile(optimizer=keras.optimizers.AdamW(0.01), loss="mse")
    return model


def divided():
    """Return a compiled model that gives its variables to three optimizers: one of a part, one of none, the default."""
    keras.utils.set_random_seed(3)
    model = Autoencoder()
    decays = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    decays.exclude_from_weight_decay(var_names=["bias"])
    unused = keras.optimizers.SGD(0.01)
    parts = {".*encoder.*": decays, ".*nowhere.*": unused}
    rest = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.8), momentum=0.9)
    model.compile(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(rest, parts)))
    return model


def optimizers_of(model):
    """Return the optimizers that the model's step uses, by name."""
    named = {"d": getattr(model, "d_optimizer", None), "g": getattr(model, "g_optimizer", None), "own": model.optimizer}
    named.update(getattr(model, "optimizers", {}))
    return {name: optimizer for name, optimizer in named.items() if optimizer is not None and optimizer.built}
