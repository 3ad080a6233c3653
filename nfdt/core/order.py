"""The order of the samples in a pass: a function of the seed and the pass alone."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

RowNumbers = npt.NDArray[np.int64]

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_WORD = 2**32
_SEED_FOR_ZERO = 2**31 - 1  # TensorFlow takes the seeds (0, 0) as none


def sample_order(samples: int, shuffle: bool, seed: int, pass_index: int) -> RowNumbers:
    """Return the row numbers in the order of one pass over the data, shape ``(samples,)``.

    Equal on every machine with the same NumPy stream, which :func:`order_crc` verifies.
    """
    if not shuffle:
        return np.arange(samples, dtype=np.int64)
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, pass_index], np.uint64)))
    return generator.permutation(samples)


def keras_order(samples: int, seed: int, block: int) -> RowNumbers:
    """Return the row numbers in the order in which Keras on TensorFlow reads shuffled arrays, shape ``(samples,)``.

    ``tf.random.shuffle`` in a graph draws them, from the same seed in each pass. They are equal on every machine.

    Args:
        samples: Number of rows.
        seed: Seed of TensorFlow when ``fit`` began, in [0, 2**31 - 1).
        block: Rows that are permuted at a time: all of them, or those of a batch with ``shuffle="batch"``.

    References:
        Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3": Philox4x32-10.
    """
    rows = list(range(samples))
    groups = -(-(block - 1) // 4)
    draws = _philox(groups * -(-samples // block), seed)
    for number, start in enumerate(range(0, samples, block)):
        stop = min(start + block, samples)
        sizes = np.arange(stop - start, 1, -1, dtype=np.uint64)
        drawn = draws[number * groups : (number + 1) * groups].reshape(-1)[: len(sizes)] % sizes
        for row, other in enumerate((np.arange(start, stop - 1) + drawn.astype(np.int64)).tolist(), start):
            rows[row], rows[other] = rows[other], rows[row]
    return np.array(rows, np.int64)


def order_crc(order: RowNumbers) -> int:
    """Return the CRC-32 of an order (little-endian int64)."""
    return zlib.crc32(np.ascontiguousarray(order, "<i8").data)


def _philox(groups: int, seed: int) -> npt.NDArray[np.uint64]:
    """Return the first groups of four 32-bit numbers of Philox4x32-10, shape ``(groups, 4)``."""
    numbers = np.arange(groups, dtype=np.uint64)
    second = np.full(groups, 0 if seed else _SEED_FOR_ZERO, np.uint64)
    counter = np.stack([numbers % _WORD, numbers // _WORD, second, np.zeros_like(second)])
    key = np.array([[seed % _WORD], [seed // _WORD]], np.uint64)
    for _ in range(_ROUNDS):
        products = counter[::2] * _MULTIPLIERS
        mixed = (products // _WORD)[::-1] ^ counter[1::2] ^ key
        low = (products % _WORD)[::-1]
        counter = np.stack([mixed[0], low[0], mixed[1], low[1]])
        key = (key + np.array([[step] for step in _KEY_STEPS], np.uint64)) % _WORD
    return counter.T
