"""Comparison of training on the ranks of this world, each with its rows, and on one process with the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hfdt.keras as hvd

STEPS, BATCH, EPOCHS = 3, 4, 2
CLASSES, FEATURES, WORDS = 3, 6, 11


def features(rng: np.random.Generator) -> np.ndarray:
    """Return the rows of one epoch: STEPS global batches."""
    return rng.normal(size=(STEPS * BATCH * hvd.size(), FEATURES)).astype("float32")


def words(rng: np.random.Generator) -> np.ndarray:
    """Return rows of word numbers, with repeated ones."""
    return rng.integers(0, WORDS, size=(STEPS * BATCH * hvd.size(), 5))


def labels(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, CLASSES, size=STEPS * BATCH * hvd.size())


def mine(rows: np.ndarray) -> np.ndarray:
    """Return this rank's part of each global batch."""
    by_rank = rows.reshape(STEPS, hvd.size(), BATCH, *rows.shape[1:])
    return by_rank[:, hvd.rank()].reshape(STEPS * BATCH, *rows.shape[1:])


def dense_model(policy: str = "float32") -> keras.Model:
    layers = [
        keras.Input((FEATURES,)),
        keras.layers.Dense(8, activation="tanh", dtype=policy),
        keras.layers.Dense(CLASSES, activation="softmax", dtype="float32"),
    ]
    model = keras.Sequential(layers)
    model.dtype_policy = keras.DTypePolicy(policy)  # simulates the global policy
    return model


def embedding_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(WORDS, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(
                CLASSES,
                activation="softmax",
            ),
        ]
    )


def all_weights(model: keras.Model) -> np.ndarray:
    return np.concatenate([np.ravel(w) for w in model.get_weights()])


def on_one_process(
    build: Callable[[], keras.Model], optimizer: Any, rows: Callable[..., np.ndarray] = features, **compile_options: Any
) -> np.ndarray:
    """Return the weights after plain Keras has trained on the global batches."""
    model, (x, y) = _prepare(build, optimizer, rows, compile_options)
    model.fit(x, y, batch_size=BATCH * hvd.size(), epochs=EPOCHS, shuffle=False, verbose=0)
    return all_weights(model)


def on_all_ranks(
    build: Callable[[], keras.Model],
    optimizer: Any,
    rows: Callable[..., np.ndarray] = features,
    callbacks: Any = (),
    **compile_options: Any,
) -> np.ndarray:
    """Return the weights after all ranks have trained together, each on its part of each global batch."""
    model, (x, y) = _prepare(build, optimizer, rows, compile_options)
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    model.fit(mine(x), mine(y), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=start)
    return all_weights(model)


def assert_equal_on_all_ranks(weights: np.ndarray) -> None:
    """Assert that values are equal on all ranks, bit for bit."""
    everyone = np.asarray(hvd.allgather(weights[None]))
    assert len(everyone) == hvd.size()
    for others in everyone:
        np.testing.assert_array_equal(weights, others)


def compare(
    build: Callable[[], keras.Model],
    make: Callable[[], Any],
    rows: Callable[..., np.ndarray] = features,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """Train both ways; the weights must agree with one process and, bit for bit, with each other."""
    together = on_all_ranks(build, hvd.DistributedOptimizer(make(), **options), rows)
    assert_equal_on_all_ranks(together)
    np.testing.assert_allclose(together, on_one_process(build, make(), rows), atol=tolerance, rtol=tolerance)


def _prepare(build: Callable[[], keras.Model], optimizer: Any, rows: Any, options: dict[str, Any]) -> Any:
    keras.utils.set_random_seed(7)
    model = build()
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", **options)
    rng = np.random.default_rng(0)
    return model, (rows(rng), labels(rng))
