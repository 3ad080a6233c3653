"""The command line that starts the ranks of an allreduce ring: values in, argv out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nfdt.core.errors import UsageError
from nfdt.core.spec import ClusterSpec

LOCAL_NAMES = ("localhost", "127.0.0.1")
_WORLD_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL", "HOROVOD_CROSS")
_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME")


@dataclass(frozen=True)
class RingShape:
    """Which ring a job wants; rings of equal shape can stand in for each other.

    Attributes:
        size: Ranks.
        launcher: ``auto``, ``mpirun``, ``horovodrun``, or ``world``: this process was started as rank 0 of one.
        hosts: ``a:2,b:2``; None: this machine.
        hostfile: A file that the launcher reads instead.
    """

    size: int
    launcher: str = "auto"
    hosts: str | None = None
    hostfile: str | None = None

    @classmethod
    def of(cls, cluster: ClusterSpec) -> RingShape:
        """The shape that a job's cluster describes."""
        return cls(cluster.workers, cluster.launcher, cluster.hosts, cluster.hostfile)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this machine, as far as the names tell."""
        if self.hostfile:
            return False
        return all(host.split(":")[0] in LOCAL_NAMES for host in (self.hosts or "localhost").split(","))


@dataclass(frozen=True)
class Surroundings:
    """What decides over a launcher's arguments: ``mpirun`` is its path, None where there is none."""

    mpirun: str | None
    cores: int
    root: bool


def choose_launcher(shape: RingShape, here: Surroundings) -> str:
    """``mpirun``, ``horovodrun`` or ``world``.

    Raises:
        UsageError: mpirun is asked for and there is none.
    """
    if shape.launcher == "mpirun" and here.mpirun is None:
        raise UsageError(
            "launcher='mpirun': expected mpirun on the PATH. Received: none. Install Open MPI "
            "(apt-get install openmpi-bin), or take launcher='horovodrun'."
        )
    if shape.launcher != "auto":
        return shape.launcher
    return "mpirun" if here.mpirun else "horovodrun"


def ring_command(shape: RingShape, program: Sequence[str], here: Surroundings) -> list[str]:
    """The argv that runs ``program`` as every rank of a ring.

    On one machine everything that the launchers listen on is bound to loopback.

    Raises:
        UsageError: the launcher that is asked for is not there.
    """
    launcher = choose_launcher(shape, here)
    if launcher == "world":
        return list(program)
    places = ["-H", shape.hosts] if shape.hosts else ["--hostfile", shape.hostfile] if shape.hostfile else []
    if launcher == "mpirun":
        return [here.mpirun or "mpirun", "-np", str(shape.size), *places, *_mpirun_options(shape, here), *program]
    # Our own entry of horovodrun: on one machine its key-value store, which asks nobody for a password, listens on
    # loopback only.
    start = [sys.executable, "-P", "-m", "hfdt.horovodrun", *(["--loopback"] if shape.one_host else [])]
    return [*start, "-np", str(shape.size), "--gloo", *places, *program]


def _mpirun_options(shape: RingShape, here: Surroundings) -> list[str]:
    options = ["--bind-to", "none", "--map-by", "slot", "--tag-output"]
    if here.root:
        options.append("--allow-run-as-root")
    if shape.one_host:
        if shape.size > here.cores and not shape.hosts:
            options.append("--oversubscribe")
        options += ["--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self,vader"]
        # Ranks of one machine copy through shared memory in any container, also without the right to trace.
        options += ["--mca", "btl_vader_single_copy_mechanism", "none"]
    return options


def ring_environment(inherited: Mapping[str, str], *, in_world: bool) -> dict[str, str]:
    """The environment of a launcher: a world that this process belongs to is not passed on, unless it is the ring."""
    kept = dict(inherited)
    if not in_world:
        foreign = (*_WORLD_VARIABLES, *_RENDEZVOUS) if "OMPI_COMM_WORLD_RANK" in inherited else _RENDEZVOUS
        kept = {name: value for name, value in inherited.items() if not name.startswith(foreign)}
    kept.pop("NFDT_TOKEN", None)
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": inherited.get("TF_CPP_MIN_LOG_LEVEL", "3"), "PYTHONUNBUFFERED": "1"}


def shown(argv: Sequence[str]) -> str:
    """The command line as one would type it."""
    return shlex.join(argv)
