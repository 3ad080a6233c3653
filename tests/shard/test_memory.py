"""The store's memory depends on the model and the workers, never on the number of steps."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.shard.messages import Gradient
from nfdt.shard.tensors import aligned_buffer
from tests.support.shard_cluster import Cluster, Reference

SMALL = ParameterLayout.of([("w", (64,))])
LARGE = ParameterLayout.of([("w", (4_000_000,))])


def resident_bytes():
    for _ in range(3):  # compiled functions go in several passes
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not in use
    return psutil.Process(os.getpid()).memory_info().rss


def store_of(layout, rule="ddc", overlap=0, backup_format="exact"):
    reference = Reference(keras.optimizers.SGD(0.01, momentum=0.9), layout=layout, weights=np.zeros(layout.size, "f4"))
    return Cluster(reference, rule=rule, overlap=overlap, backup_format=backup_format).stores[0]


def run(store, steps, start=0, workers=3):
    """Push from each of the workers in turn; those that are new pull first."""
    gradient = aligned_buffer(store.size)
    gradient[:] = 0.001
    known = store.statistics()["workers"]
    for name in (f"w{i}" for i in range(workers)):
        if name not in known:
            store.pull(name)
    for step in range(start, start + steps):
        store.push(f"w{step % workers}", Gradient(step + 1, gradient))


def test_ten_thousand_steps_leave_nothing_behind():
    store = store_of(SMALL, overlap=1)
    run(store, 1_000)
    objects, resident = len(gc.get_objects()), resident_bytes()
    run(store, 10_000, start=1_000)
    assert resident_bytes() - resident < 8 * 2**20
    assert len(gc.get_objects()) - objects < 200
    assert store.version == 11_000


def vectors_of_ten_workers(rule, overlap, backup_format):
    """Run in a process of its own: XLA keeps a pool of memory that other tests have filled."""
    store = store_of(LARGE, rule, overlap, backup_format)
    run(store, 6, workers=2)
    two = resident_bytes()
    run(store, 36, start=12, workers=12)  # ten more workers, three times around
    return (resident_bytes() - two) / (4 * LARGE.size)


@pytest.mark.parametrize(
    ("rule", "overlap", "backup_format", "vectors"),
    [("ddc", 1, "exact", 2), ("dc-a", 0, "exact", 2), ("ddc", 0, "anchored", 0.5), ("plain", 0, "none", 0)],
)
def test_a_worker_costs_its_backups_and_the_rules_state(rule, overlap, backup_format, vectors):
    program = f"import test_memory; print(test_memory.vectors_of_ten_workers({rule!r}, {overlap}, {backup_format!r}))"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 10 * vectors - 1 < float(done.stdout) < 10 * vectors + 3  # and an anchor or two, and what a step works in
