"""A Ray cluster of several nodes on this machine: Ray's own test cluster."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
            try:
                cluster.add_node(wait=False, num_cpus=0, object_store_memory=STORE_BYTES, include_dashboard=False)
            except RuntimeError as error:
                raise RuntimeError(f"{error}\n{_logs(folder)}") from error
        for _ in range(nodes):
            cluster.add_node(wait=False, num_cpus=cpus, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes(timeout=START_S)
        yield cluster
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _logs(folder: str) -> str:
    """Return the ends of what the head's processes logged."""
    files = sorted(Path(folder).glob("ray/session_*/logs/gcs_server*"))
    return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)
