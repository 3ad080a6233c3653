"""Scripts whose workers are the ranks of an allreduce ring."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from typing import Any, NoReturn

from nfdt.core.errors import NotInstalled
from nfdt.core.spec import ClusterSpec

END_S = 15.0


def require_horovod(algorithm: str) -> None:
    """Raise NotInstalled where Horovod is not installed."""
    if importlib.util.find_spec("horovod") is None:
        raise NotInstalled(
            f"algorithm={algorithm!r}: expected Horovod in this Python. Received: none. "
            "Run: ./scripts/install-horovod or choose another algorithm."
        )


def describe_ring(cluster: ClusterSpec) -> dict[str, Any]:
    """The ring for the embedded server to start."""
    found = {"launcher": cluster.launcher, "hosts": cluster.hosts, "hostfile": cluster.hostfile}
    return {"size": cluster.workers, **found}


def follow() -> NoReturn:
    """Be a rank other than 0 of the launcher's world until rank 0's script is done; then this script ends.

    Raises:
        SystemExit: always; with the rank's exit code.
    """
    command = [sys.executable, "-P", "-m", "hfdt.rank", "--watch-stdin", "--log-level", "warning"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        code = process.wait()
    finally:
        if process.stdin is not None:
            process.stdin.close()  # the rank ends with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    raise SystemExit(code)
