"""The order of the samples in a pass: a function of the seed and the pass alone."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt


def sample_order(samples: int, shuffle: bool, seed: int, pass_index: int) -> npt.NDArray[np.int64]:
    """Return the row numbers in the order of one pass over the data, shape ``(samples,)``.

    Equal on every machine with the same NumPy stream, which :func:`order_crc` verifies.
    """
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, pass_index], np.uint64)))
    return generator.permutation(samples)


def order_crc(order: npt.NDArray[np.int64]) -> int:
    """Return the CRC-32 of an order (little-endian int64)."""
    return zlib.crc32(np.ascontiguousarray(order, "<i8").data)
