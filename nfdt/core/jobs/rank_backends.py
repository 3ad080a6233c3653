"""Which jobs can train on ranks of which backend; asked by clients before anything is sent, and by servers."""

from __future__ import annotations

from nfdt.core.errors import CaptureError
from nfdt.core.host.keras_backend import TENSORFLOW, VARIABLE
from nfdt.core.specs.algorithm import AlgorithmSpec
from nfdt.core.specs.horovod_options import RingTuning
from nfdt.core.specs.job import ClusterSpec


def check_ranks(algorithm: AlgorithmSpec, cluster: ClusterSpec, backend: str) -> None:
    """Refuse a job with ranks that cannot train on a backend of Keras.

    Raises:
        CaptureError: ranks do not train on this backend with these options.
    """
    if algorithm.topology_facts.flat or backend == TENSORFLOW:
        return
    remedy = f"or set {VARIABLE}={TENSORFLOW} before the script starts."
    if cluster.elastic:
        raise CaptureError(
            "min_workers, max_workers, host_discovery_script: expected none for ranks on "
            f"{backend!r}, whose number is fixed. Take 'ddc-asgd' or 'bsp', whose workers may come and go, {remedy}"
        )
    horovods = [name for name in RingTuning.model_fields if getattr(cluster, name)]
    launchers = [name for name in ("hosts", "hostfile") if getattr(cluster, name)]
    launchers += [] if cluster.launcher in ("auto", "slots") else [f"launcher={cluster.launcher!r}"]
    if horovods or launchers:
        raise CaptureError(
            f"Options of Horovod and its launchers: expected none for ranks on {backend!r}, which are worker slots. "
            f"Received: {', '.join([*launchers, *horovods])}. Leave them out. For several machines, start "
            f"`nfdt worker` on each of them, or `mpirun nfdt mpi --algorithm {algorithm.name} SCRIPT`; {remedy}"
        )
