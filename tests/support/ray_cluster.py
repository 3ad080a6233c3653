"""A Ray cluster of several nodes on this machine: Ray's own test cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from ray.cluster_utils import Cluster

START_S = 180
STORE_BYTES = 80 * 2**20  # the least that Ray accepts; no object of a test is stored there


@contextmanager
def ray_cluster(nodes: int, cpus: int) -> Iterator[Cluster]:
    """Run a head without CPUs and ``nodes`` nodes with ``cpus`` each; nothing of it is left after the block."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path: Ray's sockets lie below it
    cluster = Cluster()
    try:
        with patch.dict("os.environ", RAY_TMPDIR=folder, RAY_gcs_server_port_wait_time_s=str(START_S)):
            cluster.add_node(wait=False, num_cpus=0, object_store_memory=STORE_BYTES, include_dashboard=False)
        for _ in range(nodes):
            cluster.add_node(wait=False, num_cpus=cpus, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes(timeout=START_S)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
