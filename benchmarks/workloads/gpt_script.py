"""An ordinary Keras script that trains a GPT-like model, and prints when its steps begin and end."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GptSize:
    """Size of a GPT-like model.

    Attributes:
        layers: Number of blocks.
        width: Width of the residual stream; a head has 64 of it.
        vocabulary: Number of tokens; their table is that of the outputs, too.
    """

    layers: int
    width: int
    vocabulary: int


SIZES = {
    "tiny": GptSize(1, 64, 100),
    "30M": GptSize(8, 384, 40_000),
    "124M": GptSize(12, 768, 50_257),
    "350M": GptSize(24, 1024, 50_257),
}
SEQUENCE, STEPS, EPOCHS = 16, 6, 3


def build(size: GptSize, sequence: int = SEQUENCE) -> Any:
    """Return the model of sequences of this length, not compiled."""
    import keras
    from keras import layers

    inputs = keras.Input((sequence,), dtype="int32")
    tokens = layers.ReversibleEmbedding(size.vocabulary, size.width, tie_weights=True)
    flow = tokens(inputs)
    for _ in range(size.layers):
        normal = layers.LayerNormalization()(flow)
        attention = layers.MultiHeadAttention(max(1, size.width // 64), 64)
        flow = flow + attention(normal, normal, use_causal_mask=True)
        hidden = layers.Dense(4 * size.width, activation="gelu")(layers.LayerNormalization()(flow))
        flow = flow + layers.Dense(size.width)(hidden)
    return keras.Model(inputs, tokens(layers.LayerNormalization()(flow), reverse=True))


def main() -> None:
    import keras
    import numpy as np

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("optimizer", choices=("sgd", "adamw"))
    options = parser.parse_args()
    size = SIZES[options.size]

    class Marks(keras.callbacks.Callback):
        """Prints the time of the end of the first step, and of the last one."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                print("steady", time.time(), flush=True)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == EPOCHS - 1:
                print("trained", time.time(), flush=True)

    keras.utils.set_random_seed(1)
    model = build(size)
    optimizers = {"sgd": keras.optimizers.SGD(0.01), "adamw": keras.optimizers.AdamW(1e-4)}
    model.compile(optimizers[options.optimizer], keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    print("weights", model.count_params(), flush=True)
    x = np.random.default_rng(0).integers(0, size.vocabulary, (STEPS, SEQUENCE + 1)).astype("int32")
    model.fit(x[:, :-1], x[:, 1:], batch_size=1, epochs=EPOCHS, verbose=0, callbacks=[Marks()])


if __name__ == "__main__":
    main()
