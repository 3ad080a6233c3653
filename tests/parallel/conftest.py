"""Tests that need several ranks: ``mpirun -np 2 python -m pytest -x tests/parallel``. Plain pytest starts them from
``tests/test_parallel.py``."""

from __future__ import annotations

import os

import pytest

SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE", "PMI_SIZE")
RANKS = next((int(os.environ[name]) for name in SIZE_VARIABLES if name in os.environ), 0)
collect_ignore_glob = [] if RANKS else ["test_*.py"]


@pytest.fixture(scope="session")
def even_ranks():
    """Return the process set of the ranks 0, 2, 4, ..."""
    import hfdt.keras as hvd

    return hvd.ProcessSet(range(0, RANKS, 2))


@pytest.fixture(scope="session", autouse=True)
def world(even_ranks):
    """Provide the ranks of this launch to all tests."""
    import hfdt.keras as hvd

    hvd.init(process_sets=[even_ranks])
    assert hvd.size() > 1
    yield hvd
    hvd.shutdown()


@pytest.fixture(autouse=True)
def _together(world):
    """Start every test when all ranks have ended the previous one."""
    world.allreduce(0.0, name="together")
