from __future__ import annotations

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
