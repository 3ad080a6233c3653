from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.fakes import Client
from tests.support.job_server import LocalJobServer


@pytest.fixture
def cluster(tmp_path) -> Iterator[LocalJobServer]:
    cluster = LocalJobServer(tmp_path / "state")
    yield cluster
    cluster.stop()


@pytest.fixture
def start(cluster) -> Callable[..., Client]:
    return cluster.start


@pytest.fixture
def gate():
    """Provide an event that the tasks of gated workers wait for."""
    gate = threading.Event()
    yield gate
    gate.set()
