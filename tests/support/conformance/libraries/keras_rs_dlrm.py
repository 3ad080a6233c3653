"""A DLRM of KerasRS: dense features, embeddings and their products."""

import keras
import keras_rs
import numpy as np

keras.utils.set_random_seed(0)
dense = keras.Input((4,), name="numbers")
ids = [keras.Input((), name=f"feature{number}", dtype="int32") for number in range(3)]
bottom = keras.layers.Dense(8, "relu")(dense)
looked_up = [keras.layers.Embedding(30, 8)(feature) for feature in ids]
products = keras_rs.layers.DotInteraction()([bottom, *looked_up])
crossed = keras.layers.Concatenate()([bottom, products])
crossed = keras_rs.layers.FeatureCross(projection_dim=4)(crossed, crossed)
model = keras.Model([dense, *ids], keras.layers.Dense(1, "sigmoid")(crossed))
model.compile("adagrad", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])

draw = np.random.default_rng(0)
x = {"numbers": draw.normal(size=(128, 4)).astype("float32")}
x.update({f"feature{number}": draw.integers(0, 30, 128) for number in range(3)})
y = (x["numbers"][:, 0] > 0).astype("float32")
model.fit(x, y, batch_size=16, epochs=3, verbose=0)
