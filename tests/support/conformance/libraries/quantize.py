"""A model that is quantized to int8: its LoRA weights train, and a trained one is quantized for predictions."""

import keras
import numpy as np

keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
x = draw.normal(size=(96, 8)).astype("float32")
y = x[:, 0] - x[:, 1]

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-2), "mse")
model.fit(x, y, batch_size=16, epochs=3, verbose=0)

model.quantize("int8")
print(model.predict(x[:3], verbose=0).shape)
for layer in model.layers:
    layer.enable_lora(2)
model.compile(keras.optimizers.Adam(1e-2), "mse")
model.fit(x, y, batch_size=16, epochs=3, verbose=0)
