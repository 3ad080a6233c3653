"""Searches of KerasTuner: RandomSearch and Hyperband."""

import tempfile

import keras
import keras_tuner
import numpy as np

keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
x = draw.normal(size=(96, 4)).astype("float32")
y = x @ np.array([1.0, -2.0, 0.5, 0.0], "float32")


def build(choices):
    keras.utils.set_random_seed(0)
    units = choices.Int("units", 2, 8, step=2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(choices.Choice("rate", [1e-2, 3e-2])), "mse")
    return model


with tempfile.TemporaryDirectory() as folder:
    options = {"objective": "val_loss", "seed": 0, "directory": folder}
    for tuner in (
        keras_tuner.RandomSearch(build, max_trials=3, project_name="random", **options),
        keras_tuner.Hyperband(build, max_epochs=4, factor=2, hyperband_iterations=1, project_name="band", **options),
    ):
        tuner.search(x, y, batch_size=16, epochs=3, validation_split=0.25, verbose=0)
        print(tuner.get_best_hyperparameters()[0].values)
        print(tuner.get_best_models()[0].predict(x[:3], verbose=0).shape)
