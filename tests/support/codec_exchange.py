"""One side of an exchange in codecs, for a process of its own."""

from __future__ import annotations

import json
import sys

import numpy as np

from nfdt.codecs import ErrorFeedback, make_codec
from nfdt.codecs.base import BLOCK, BUCKET

STEPS, PARAMETERS = 3, 2 * BLOCK + 777


def of_all_sizes(size, seed=0):
    """Return finite numbers from the smallest to the greatest, every bucket of another size."""
    random = np.random.default_rng(seed)
    exponents = np.repeat(random.integers(-44, 38, size // BUCKET + 1), BUCKET)[:size]
    with np.errstate(over="ignore"):
        numbers = random.normal(size=size).astype(np.float32) * np.float32(10) ** exponents.astype(np.float32)
    return np.clip(numbers, -3.4e38, 3.4e38).astype(np.float32)


def step_vectors(step):
    """Return a gradient and the next weights, the same in both processes."""
    return of_all_sizes(PARAMETERS, step) / 8, np.random.default_rng(99 + step).normal(size=PARAMETERS).astype("f4")


def exchange_as_worker(folder, name):
    """Encode gradients with feedback, and follow the weights of the other process by differences."""
    codec, feedback = make_codec(name, top_k=1.0), ErrorFeedback(PARAMETERS)
    weights, out = np.zeros((2, PARAMETERS), np.float32)
    for step in range(STEPS):
        (payload,) = feedback.encode(codec, step_vectors(step)[0], [slice(0, PARAMETERS)])
        np.save(f"{folder}/push{step}.npy", payload)
        codec.decode_and_add(np.load(f"{folder}/reply{step}.npy"), weights, out)
        weights, out = out, weights
    np.save(f"{folder}/residual.npy", feedback.residual)
    np.save(f"{folder}/weights.npy", weights)
    print(json.dumps({"compiled": "nfdt.codecs.kernels" in sys.modules}))
