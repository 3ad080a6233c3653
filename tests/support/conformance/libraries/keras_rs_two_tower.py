"""Retrieval with two towers of KerasRS, with a loss of the model's own and two optimizers."""

import keras
import keras_rs
import numpy as np

USERS, MOVIES = 50, 40


class Towers(keras.Model):
    def __init__(self):
        super().__init__()
        self.users = keras.Sequential([keras.layers.Embedding(USERS, 8)])
        self.movies = keras.Sequential([keras.layers.Embedding(MOVIES, 8)])
        self.retrieval = keras_rs.layers.BruteForceRetrieval(k=5, return_scores=False)
        self.scores = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")

    def build(self, shape=None):
        self.users.build((None,))
        self.movies.build((None,))
        self.retrieval.candidate_embeddings = self.movies.layers[0].embeddings
        self.retrieval.build((None, 8))
        self.built = True

    def call(self, inputs, training=False):
        users = self.users(inputs)
        result = {"users": users}
        if not training:
            result["predictions"] = self.retrieval(users)
        return result

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        scores = keras.ops.matmul(y_pred["users"], keras.ops.transpose(self.movies(y)))
        return self.scores(keras.ops.eye(keras.ops.shape(scores)[0]), scores, sample_weight)


draw = np.random.default_rng(0)
users, movies = draw.integers(0, USERS, 256), draw.integers(0, MOVIES, 256)
for optimizer in (keras.optimizers.SGD(0.05), keras.optimizers.Adagrad(0.1)):
    keras.utils.set_random_seed(0)
    model = Towers()
    model.compile(optimizer=optimizer)
    model.fit(users, movies, batch_size=32, epochs=3, verbose=0)
    print(model.predict(users[:4], verbose=0)["predictions"].shape)
