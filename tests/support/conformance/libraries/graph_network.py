"""A graph network of Keras layers: messages along edges, summed at their targets."""

import keras
import numpy as np

keras.utils.set_random_seed(0)
GRAPHS, NODES, EDGES = 64, 6, 10


class MessagePassing(keras.layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.message, self.update = keras.layers.Dense(units, "relu"), keras.layers.Dense(units, "relu")

    def build(self, shapes):
        nodes, _ = shapes
        self.message.build((*nodes[:-1], 2 * nodes[-1]))
        self.update.build((*nodes[:-1], nodes[-1] + self.units))

    def call(self, inputs):
        nodes, edges = inputs
        ends = [keras.ops.take_along_axis(nodes, edges[..., end, None], axis=1) for end in (0, 1)]
        messages = self.message(keras.ops.concatenate(ends, -1))
        targets = keras.ops.one_hot(edges[..., 1], nodes.shape[1])
        received = keras.ops.einsum("ben,beu->bnu", targets, messages)
        return self.update(keras.ops.concatenate([nodes, received], -1))


draw = np.random.default_rng(0)
nodes = draw.normal(size=(GRAPHS, NODES, 3)).astype("float32")
edges = draw.integers(0, NODES, (GRAPHS, EDGES, 2)).astype("int32")
targets = nodes.sum((1, 2))

features, pairs = keras.Input((NODES, 3)), keras.Input((EDGES, 2), dtype="int32")
hidden = MessagePassing(8)([features, pairs])
hidden = MessagePassing(8)([hidden, pairs])
model = keras.Model([features, pairs], keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden)))
model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
model.fit([nodes, edges], targets, batch_size=16, epochs=3, verbose=0)
