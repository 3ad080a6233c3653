"""A DistributedEmbedding of KerasRS, with tables that features share and the optimizers of the tables."""

import keras
import keras_rs
import numpy as np

keras.utils.set_random_seed(0)
BATCH = 16
first = keras.initializers.RandomUniform(-0.05, 0.05, seed=1)  # those of tables do not follow set_random_seed
movies = keras_rs.layers.TableConfig(
    name="movies", vocabulary_size=30, embedding_dim=8, initializer=first, optimizer="adam", placement="auto"
)
users = keras_rs.layers.TableConfig(
    name="users", vocabulary_size=20, embedding_dim=8, initializer=first, combiner="mean"
)
features = {
    "liked": keras_rs.layers.FeatureConfig(name="liked", table=movies, input_shape=(BATCH, 3), output_shape=(BATCH, 8)),
    "watched": keras_rs.layers.FeatureConfig(
        name="watched", table=movies, input_shape=(BATCH,), output_shape=(BATCH, 8)
    ),
    "user": keras_rs.layers.FeatureConfig(name="user", table=users, input_shape=(BATCH,), output_shape=(BATCH, 8)),
}


class Rater(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = keras_rs.layers.DistributedEmbedding(features)
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        found = self.embedding(inputs)
        return self.dense(keras.layers.concatenate([found[name] for name in sorted(found)]))


draw = np.random.default_rng(0)
x = {
    "liked": draw.integers(0, 30, (128, 3)),
    "watched": draw.integers(0, 30, 128),
    "user": draw.integers(0, 20, 128),
}
y = (x["user"] % 5).astype("float32")
model = Rater()
model.compile(keras.optimizers.SGD(1e-2), "mse")  # Adam: see docs/embeddings.md, "Repeated rows"
model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
