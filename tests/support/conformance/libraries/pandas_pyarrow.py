"""Tables of pandas, whose strings pyarrow holds."""

import keras
import numpy as np
import pandas
import pyarrow

assert pandas.options.mode is not None
keras.utils.set_random_seed(0)
draw = np.random.default_rng(0)
columns = {name: draw.normal(size=960) for name in "ab"}
table = pandas.DataFrame(columns).convert_dtypes(dtype_backend="pyarrow")
print(pyarrow.__version__, table.dtypes["a"])
x = table.astype("float64")

model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, x["a"] - x["b"], batch_size=16, epochs=3, verbose=0)
