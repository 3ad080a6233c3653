"""Parts of scripts that train with allreduce, and the search for processes that they leave behind."""

from __future__ import annotations

import psutil

from tests.support.scripts import DIGITS

MODELS = (
    DIGITS
    + """
import hfdt

x, y = x[:1003], y[:1003]
words = (x[:, :12] * 16).astype("int32")

def dense(optimizer):
    keras.utils.set_random_seed(3)
    return compiled(optimizer, keras.Input((64,)), keras.layers.Dense(16, "tanh"))

def large(optimizer):  # its gradients are reduced in two buckets
    keras.utils.set_random_seed(3)
    return compiled(optimizer, keras.Input((64,)), keras.layers.Dense(1024, "tanh"), keras.layers.Dense(1025, "tanh"))

def embedding(optimizer):
    keras.utils.set_random_seed(3)
    return compiled(optimizer, keras.Input((12,), dtype="int32"), keras.layers.Embedding(17, 8), keras.layers.Flatten())

def compiled(optimizer, *layers):
    model = keras.Sequential([*layers, keras.layers.Dense(10, "softmax", dtype="float32")])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model

def mixed(optimizer):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense(optimizer)
    finally:
        keras.config.set_dtype_policy("float32")

def generator(size):
    def batches():
        while True:
            for start in range(0, 1003, size):
                yield x[start : start + size], y[start : start + size]
    return batches()

def own_variables(model):
    return getattr(model.optimizer, "inner_optimizer", model.optimizer).variables

def difference(model, reference):
    pairs = zip(model.get_weights(), reference.get_weights())
    return max(float(np.abs(a - b).max()) for a, b in pairs)
"""
)


def left_behind(mark: str) -> list[str]:
    """Return the processes of a run whose environment holds ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RING_TEST") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
