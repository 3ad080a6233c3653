"""Memory of a shard's store in this process."""

from __future__ import annotations

import ctypes
import gc
import os

import keras
import numpy as np
import psutil

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.shard.buffers import aligned_buffer
from nfdt.shard.messages import Gradient
from tests.support.shard_cluster import Cluster, Reference

LARGE = ParameterLayout.of([("w", (4_000_000,))])


def resident_bytes():
    for _ in range(3):  # compiled functions go in several passes
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator keeps for later is not in use
    return psutil.Process(os.getpid()).memory_info().rss


def store_of(layout, rule="ddc", overlap=0, backup_format="exact"):
    reference = Reference(keras.optimizers.SGD(0.01, momentum=0.9), layout=layout, weights=np.zeros(layout.size, "f4"))
    return Cluster(reference, rule=rule, overlap=overlap, backup_format=backup_format).stores[0]


def push_steps(store, steps, start=0, workers=3):
    """Push from each of the workers in turn; those that are new pull first."""
    gradient = aligned_buffer(store.size)
    gradient[:] = 0.001
    known = store.statistics()["workers"]
    for name in (f"w{i}" for i in range(workers)):
        if name not in known:
            store.pull(name)
    for step in range(start, start + steps):
        store.push(f"w{step % workers}", Gradient(step + 1, gradient))


def vectors_of_ten_workers(rule, overlap, backup_format):
    """Return the vectors of memory that ten workers cost; the process must be new, as XLA keeps a pool of memory."""
    store = store_of(LARGE, rule, overlap, backup_format)
    push_steps(store, 6, workers=2)
    two = resident_bytes()
    push_steps(store, 36, start=12, workers=12)  # ten more workers, three times around
    return (resident_bytes() - two) / (4 * LARGE.size)
