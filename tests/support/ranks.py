"""Commands and environments of ranks that share one machine."""

from __future__ import annotations

import os

MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_tcp_if_include", "lo"]
MPIRUN += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]  # ranks share the cores


def rank_environment() -> dict[str, str]:
    """Return this process's environment without its launcher and test run; ranks that wait in vain end."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "OMPI_", "HOROVOD_"))},
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "20",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "60",
    }
