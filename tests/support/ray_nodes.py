"""Program that runs a Ray cluster of several nodes on this machine, Ray's own test cluster, until its input ends.

It prints the address of the head, and a line after each line of its input, for which it ends the node it added last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

START_S = 180
STORE_BYTES = 80 * 2**20  # the least that Ray accepts; no object of a test is stored there


def main(folder: str, nodes: int, cpus: int) -> None:
    """Run a head without CPUs and ``nodes`` nodes with ``cpus`` each, whose files are in a folder."""
    os.environ.update(RAY_TMPDIR=folder, RAY_gcs_server_port_wait_time_s=str(START_S))
    cluster = Cluster()
    try:
        try:
            cluster.add_node(wait=False, num_cpus=0, object_store_memory=STORE_BYTES, include_dashboard=False)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{logs(folder)}") from error
        for _ in range(nodes):
            cluster.add_node(wait=False, num_cpus=cpus, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes(timeout=START_S)
        print(cluster.address, flush=True)
        for _ in sys.stdin:
            cluster.remove_node(list(cluster.worker_nodes)[-1])
            print("removed", flush=True)
    finally:
        cluster.shutdown()


def logs(folder: str) -> str:
    """Return the ends of what the head's processes logged."""
    files = sorted(Path(folder).glob("ray/session_*/logs/gcs_server*"))
    return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
