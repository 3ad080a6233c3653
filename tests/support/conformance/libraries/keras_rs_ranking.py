"""Ranking losses and metrics of KerasRS, one fit for each loss."""

import keras
import keras_rs
import numpy as np

draw = np.random.default_rng(0)
x = draw.normal(size=(64, 5, 3)).astype("float32")
y = (x.sum(-1) > 0).astype("float32") + (x.sum(-1) > 1)

for loss in (
    keras_rs.losses.PairwiseHingeLoss(),
    keras_rs.losses.PairwiseLogisticLoss(),
    keras_rs.losses.PairwiseMeanSquaredError(),
    keras_rs.losses.ListMLELoss(),
):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 3))
    outputs = keras.layers.Reshape((5,))(keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(inputs)))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=[keras_rs.metrics.NDCG(k=3, name="ndcg")])
    model.fit(x, y, batch_size=16, epochs=3, verbose=0)
