"""Tests that need several ranks: ``mpirun -np 2 python -m pytest -x tests/parallel``. Plain pytest starts them from
``tests/test_parallel.py``."""

from __future__ import annotations

import os

import pytest

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK", "PMI_RANK")
collect_ignore_glob = [] if any(name in os.environ for name in RANK_VARIABLES) else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def world():
    """Provide the ranks of this launch to all tests."""
    import hfdt.keras as hvd

    hvd.init()
    assert hvd.size() > 1
    yield hvd
    hvd.shutdown()


@pytest.fixture(autouse=True)
def _together(world):
    """Start every test when all ranks have ended the previous one."""
    world.allreduce(0.0, name="together")
