"""Command line that starts the ranks of an allreduce ring: values in, argv out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nfdt.core.errors import UsageError
from nfdt.core.host.launcher_rank import LOCAL_NAMES, one_name_per_slot
from nfdt.core.host.link_probes import VARIABLE, LinkProbes
from nfdt.core.specs.horovod_options import RingElastic, RingTuning
from nfdt.core.specs.job import ClusterSpec

# Ranks find each other by these variables. A launcher that inherited those of an outer launch would join its world.
_WORLD_VARIABLES = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL", "HOROVOD_CROSS")
_RENDEZVOUS = ("HOROVOD_GLOO_RENDEZVOUS", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME")


@dataclass(frozen=True)
class RingShape:
    """Description of the ring that a job requests; rings of equal shape are interchangeable.

    Attributes:
        size: Number of ranks.
        launcher: ``auto``, ``slots``, ``mpirun``, ``horovodrun``, or ``world``: this process was started as rank 0.
        hosts: ``a:2,b:2``; None: this machine.
        hostfile: File that the launcher reads instead.
        tuning: Options of Horovod.
        elastic: Options of an elastic ring.
        members: Numbers of the workers of a group, by rank; empty: a ring that is no group.
        neighbours: Number of ranks of other groups that share its machine.
        probes: Probes of the connections between its machines.
    """

    size: int
    launcher: str = "auto"
    hosts: str | None = None
    hostfile: str | None = None
    tuning: RingTuning = RingTuning()
    elastic: RingElastic = RingElastic()
    members: tuple[int, ...] = ()
    neighbours: int = 0
    probes: LinkProbes = LinkProbes()

    @classmethod
    def of(cls, cluster: ClusterSpec) -> RingShape:
        """Return the shape for a job's cluster."""
        return cls.from_json({"size": cluster.workers, **cluster.model_dump()})

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> RingShape:
        """Return the shape for a flat mapping of a cluster's options and ``size``; other names are ignored."""
        return cls(
            int(options["size"]),
            options.get("launcher") or "auto",
            options.get("hosts"),
            options.get("hostfile"),
            RingTuning(**{name: options[name] for name in RingTuning.model_fields if name in options}),
            RingElastic(**{name: options[name] for name in RingElastic.model_fields if name in options}),
            tuple(options.get("members", ())),
            int(options.get("neighbours", 0)),
            LinkProbes.within(options.get("heartbeat_s", 2.0), options.get("lost_s", 8.0)),
        )

    @property
    def in_slots(self) -> bool:
        """Whether the job asks for ranks in worker slots."""
        return self.launcher == "slots"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the ranks."""
        return {**self.tuning.variables(), VARIABLE: str(self.probes)}

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the server's machine that the job names and that the ring reads, runs or writes."""
        named = (self.hostfile, self.tuning.timeline, self.tuning.autotune_log, self.elastic.host_discovery_script)
        return tuple(name for name in named if name)

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this machine, by their names."""
        if self.hostfile or self.elastic.network_interfaces:
            return False
        return all(host.split(":")[0] in LOCAL_NAMES for host in (self.hosts or "localhost").split(","))

    @property
    def most_on_a_host(self) -> int:
        """Largest number of ranks on one host, as far as it is known."""
        if not self.hosts or self.hostfile:
            return self.size
        return min(self.size, max(int(place.partition(":")[2] or 1) for place in self.hosts.split(",")))


@dataclass(frozen=True)
class HostInfo:
    """Properties of this machine that determine a launcher's arguments.

    Attributes:
        mpirun: Path of ``mpirun``; None without it.
        cores: Number of cores that this process may use.
        root: Whether this process runs as root.
    """

    mpirun: str | None
    cores: int
    root: bool


def choose_launcher(shape: RingShape, here: HostInfo) -> str:
    """Choose ``mpirun``, ``horovodrun`` or ``world``.

    Raises:
        UsageError: mpirun is requested and not installed, or cannot run an elastic ring.
    """
    if shape.elastic.elastic and shape.launcher == "mpirun":
        raise UsageError(
            "launcher='mpirun': expected horovodrun for an elastic ring (min_workers, max_workers, "
            "host_discovery_script): mpirun ends all ranks when one dies. Leave launcher out."
        )
    if shape.launcher == "mpirun" and here.mpirun is None:
        raise UsageError(
            "launcher='mpirun': expected mpirun on the PATH. Received: none. Install Open MPI "
            "(apt-get install openmpi-bin), or take launcher='horovodrun'."
        )
    if shape.launcher != "auto":
        return shape.launcher
    return "mpirun" if here.mpirun and not shape.elastic.elastic else "horovodrun"


def ring_command(shape: RingShape, program: Sequence[str], here: HostInfo, *, folder: Path | None = None) -> list[str]:
    """Return the command line that runs ``program`` as every rank of a ring.

    On one machine all sockets of the launchers are bound to loopback.

    Args:
        shape: Shape of the ring.
        program: Command line of a rank.
        here: Properties of this machine.
        folder: Folder of this ring alone, for the session files of an mpirun whose ranks are all on this machine;
            None: where Open MPI puts them.

    Raises:
        UsageError: The requested launcher is not installed.
    """
    launcher = choose_launcher(shape, here)
    if launcher == "world":
        return list(program)
    places = ["-H", shape.hosts] if shape.hosts else ["--hostfile", shape.hostfile] if shape.hostfile else []
    if launcher == "mpirun":
        variables = [part for name, value in shape.variables.items() for part in ("-x", f"{name}={value}")]
        start = [here.mpirun or "mpirun", "-np", str(shape.size), *places, *_mpirun_options(shape, here, folder)]
        return [*start, *variables, *program]
    # Our own entry of horovodrun: on one machine its key-value store, which has no password, listens on loopback
    # only.
    reach = ["--loopback"] if shape.one_host else ["--probes", str(shape.probes)]
    start = [sys.executable, "-P", "-m", "hfdt.horovodrun", *reach]
    ranks = shape.size
    if shape.elastic.elastic:
        start.append("--watch-parent")
        places = places if shape.hostfile else ["-H", _own_names(shape)]
        if shape.elastic.host_discovery_script:  # Horovod begins with all hosts of the script, once these are enough
            places, ranks = [], shape.elastic.min_workers or shape.size
        places += shape.elastic.elastic_flags()
    return [*start, "-np", str(ranks), "--gloo", *places, *shape.tuning.tuning_flags(), *program]


def _own_names(shape: RingShape) -> str:
    """Return the hosts, with a separate name per rank on this machine, because Horovod excludes whole hosts."""
    hosts = shape.hosts or f"localhost:{shape.elastic.max_workers or shape.size}"
    slots = {host: int(count or 1) for host, _, count in (place.partition(":") for place in hosts.split(","))}
    return ",".join(f"{host}:{count}" for host, count in one_name_per_slot(slots).items())


def _mpirun_options(shape: RingShape, here: HostInfo, folder: Path | None) -> list[str]:
    options = ["--bind-to", "none", "--map-by", "slot", "--tag-output"]
    if here.root:
        options.append("--allow-run-as-root")
    if shape.one_host and shape.size > here.cores and not shape.hosts:
        options.append("--oversubscribe")
    parameters: dict[str, object] = {}
    # A waiting rank must not spin if other rings, or its own gradient, could use the core. Other machines have as many.
    if shape.members or 2 * shape.most_on_a_host > here.cores:
        parameters["mpi_yield_when_idle"] = 1
    if shape.one_host:
        parameters |= {"oob_tcp_if_include": "lo", "btl": "self,vader"}
        # Ranks of one machine copy through shared memory in any container, even without the right to trace.
        parameters["btl_vader_single_copy_mechanism"] = "none"
        # By default all mpiruns of a user share /tmp/ompi.<host>.<user>, which one that ends removes while one starts.
        parameters |= {"orte_tmpdir_base": folder} if folder else {}
    else:  # mpirun ends the ranks, and names the machine, when its connection to one is lost
        probes = shape.probes
        parameters |= {"oob_tcp_keepalive_time": probes.every_s, "oob_tcp_keepalive_intvl": probes.every_s}
        parameters["oob_tcp_keepalive_probes"] = probes.count
    return [*options, *(part for name, value in parameters.items() for part in ("--mca", name, str(value)))]


def ring_environment(
    inherited: Mapping[str, str], *, in_world: bool, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a launcher, without the variables of a world that this process belongs to.

    Args:
        inherited: Environment of this process.
        in_world: Whether that world is the ring, so that its variables are kept.
        variables: Variables for Horovod.
    """
    kept = dict(inherited)
    if not in_world:
        foreign = (*_WORLD_VARIABLES, *_RENDEZVOUS) if "OMPI_COMM_WORLD_RANK" in inherited else _RENDEZVOUS
        kept = {name: value for name, value in inherited.items() if not name.startswith(foreign)}
    kept.pop("NFDT_TOKEN", None)
    kept |= variables or {}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": inherited.get("TF_CPP_MIN_LOG_LEVEL", "3"), "PYTHONUNBUFFERED": "1"}
