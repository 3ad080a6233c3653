"""Allreduce rings of a script: checks, descriptions, and what a script does that is not rank 0."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from nfdt.core.errors import NotInstalled, UsageError
from nfdt.core.host.keras_backend import TENSORFLOW, current_backend
from nfdt.core.host.machine import is_own_address
from nfdt.core.specs.algorithm import AlgorithmSpec, explicit_groups
from nfdt.core.specs.job import ClusterSpec

END_S = 15.0


def require_horovod(algorithm: str) -> None:
    """Raise NotInstalled if the ranks of an algorithm need Horovod, as on TensorFlow, and it is not installed."""
    if current_backend().name == TENSORFLOW and importlib.util.find_spec("horovod") is None:
        raise NotInstalled(
            f"algorithm={algorithm!r}: expected Horovod in this Python. Received: none. "
            "Run: ./scripts/install-horovod or choose another algorithm."
        )


def describe_ring(cluster: ClusterSpec) -> dict[str, Any]:
    """Return the description of the ring that the embedded server starts."""
    return {"size": cluster.workers, **cluster.model_dump(exclude={"workers", "shards", "emulate"}, exclude_none=True)}


def describe_groups(algorithm: AlgorithmSpec, cluster: ClusterSpec) -> list[dict[str, Any]]:
    """Return the initial worlds of a grouped job: its groups, or one world of all workers to measure their speeds."""
    groups = explicit_groups(algorithm.groups, cluster.workers) or (tuple(range(cluster.workers)),)
    return [
        {**describe_ring(cluster), "size": len(group), "members": group, "neighbours": cluster.workers - len(group)}
        for group in groups
    ]


def elastic_limits(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the limits of an elastic world; only its launcher needs them."""
    elastic = environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")
    return {"min_workers": 1 if elastic else None, "max_workers": None, "host_discovery_script": None}


def resolve_files(cluster: ClusterSpec) -> ClusterSpec:
    """Resolve the ring's file names relative to this script's working directory.

    Raises:
        UsageError: a file cannot be used.
    """
    named = {name: getattr(cluster, name) for name in ("timeline", "autotune_log", "host_discovery_script")}
    paths = {name: os.path.abspath(os.path.expanduser(path)) for name, path in named.items() if path}
    script = paths.pop("host_discovery_script", None)
    if script is not None:
        if not os.access(script, os.X_OK) or os.path.isdir(script):
            raise UsageError(f"host_discovery_script: expected an executable file. Received: {script!r}.")
        status = os.stat(script)
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise UsageError(
                "host_discovery_script: expected a file that is yours and that nobody else may write to, because it is "
                f"run every second. Received: {script!r}. Run: chmod go-w {script}"
            )
        paths["host_discovery_script"] = script
    for name, path in paths.items():
        if not os.path.isdir(os.path.dirname(path)):
            raise UsageError(f"{name}: expected a file in a directory that exists. Received: {path!r}.")
    return cluster.model_copy(update=paths)


def place_first_rank(cluster: ClusterSpec) -> ClusterSpec:
    """Return the cluster with this machine first among its hosts: rank 0 talks to the server beside this script.

    Raises:
        UsageError: this machine is not among the hosts, or not the first one of the hostfile.
    """
    if cluster.hosts:
        places = cluster.hosts.split(",")
        own = next((place for place in places if is_own_address(place.partition(":")[0])), None)
        if own is None:
            raise UsageError(
                f"hosts: expected this machine, {socket.gethostname()}, among them, because a rank on it talks to the "
                f"script. Received: {cluster.hosts!r}. Add localhost:1, or run the script on one of them."
            )
        places.remove(own)
        return cluster.model_copy(update={"hosts": ",".join([own, *places])})
    if cluster.hostfile:
        first = _first_host(cluster.hostfile)
        if not is_own_address(first):
            raise UsageError(
                f"hostfile: expected this machine, {socket.gethostname()}, in the first line of {cluster.hostfile!r}, "
                f"because rank 0 talks to the script. Received: {first!r}. Put localhost first."
            )
    return cluster


def _first_host(hostfile: str) -> str:
    try:
        with open(hostfile, encoding="utf-8") as file:
            named = (line.partition("#")[0].split() for line in file)
            return next((words[0].partition(":")[0] for words in named if words), "")
    except OSError as error:
        raise UsageError(f"hostfile: expected a file with hosts. Received: {error}.") from None


def follow(cluster: ClusterSpec) -> NoReturn:
    """Run as a rank other than 0 of the launcher's world until rank 0's script is done; then end this script.

    Args:
        cluster: Cluster options; they configure this rank's Horovod.

    Raises:
        SystemExit: always; with the rank's exit code.
    """
    command = [sys.executable, "-P", "-m", "hfdt.runtime.rank", "--watch-stdin", "--log-level", "warning"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **cluster.variables()})
    try:
        code = process.wait()
    finally:
        if process.stdin is not None:
            process.stdin.close()  # the rank ends with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    raise SystemExit(code)
