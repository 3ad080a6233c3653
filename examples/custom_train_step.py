"""A subclassed model with its own ``train_step``: classes of the script are sent to the workers by value.

nfdt run --workers 2 examples/custom_train_step.py
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits


class NoisyClassifier(keras.Model):
    """Classifier that trains on images with new noise in every step and reports the norm of its gradient."""

    def __init__(self, noise: float = 0.1) -> None:
        super().__init__()
        self.noise = noise
        self.hidden = keras.layers.Dense(64, activation="relu")
        self.out = keras.layers.Dense(10, activation="softmax")
        self.gradient_norm = keras.metrics.Mean(name="gradient_norm")

    def call(self, inputs):
        """Return the class probabilities of a batch of images."""
        return self.out(self.hidden(inputs))

    def train_step(self, data):
        """Run one training step on noisy images, written as in Keras' guide."""
        x, y = data
        noisy = x + self.noise * tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            prediction = self(noisy, training=True)
            loss = self.compute_loss(x=noisy, y=y, y_pred=prediction)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.gradient_norm.update_state(tf.linalg.global_norm(gradients))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            elif metric is not self.gradient_norm:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


def main() -> None:
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    x, y = images.astype("float32") / 16.0, labels
    model = NoisyClassifier()
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=32, epochs=5, verbose=2)
    print(f"training accuracy: {history.history['accuracy'][-1]:.4f}")
    print(f"mean gradient norm: {history.history['gradient_norm'][-1]:.4f}")


if __name__ == "__main__":
    main()
