"""Rank of this process among those that mpirun, srun or horovodrun started, from the launcher's environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nfdt.core.errors import UsageError

# (rank, size, local rank, job id): the first launcher whose rank variable is set wins.
_LAUNCHERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("HOROVOD_RANK", ("HOROVOD_SIZE",), ("HOROVOD_LOCAL_RANK",), ("HOROVOD_GLOO_RENDEZVOUS_PORT",)),
    (
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports", "OMPI_MCA_orte_hnp_uri"),
    ),
    ("PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("PMI_JOBID", "PMI_PORT", "SLURM_JOB_ID")),
    ("SLURM_PROCID", ("SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",), ("SLURM_JOB_ID",)),
    ("PMIX_RANK", ("PMIX_SIZE", "SLURM_NTASKS"), ("PMIX_LOCAL_RANK",), ("PMIX_NAMESPACE",)),
)
_ATTEMPT = ("SLURM_STEP_ID", "SLURM_RESTART_COUNT")  # a requeued job has its old id, and its steps too


# Names of this machine: a launcher needs no login to start processes on them.
LOCAL_NAMES = ("localhost", "127.0.0.1")


def local_names(count: int) -> list[str]:
    """Return ``count`` different names of the loopback address: 127.0.0.1, 127.0.0.01, 127.0.0.001, ..."""
    return [f"127.0.0.{'0' * i}1" for i in range(count)]


def one_name_per_slot(host_slots: Mapping[str, int]) -> dict[str, int]:
    """Return hosts and slots, with a different host name for each slot of this machine.

    Args:
        host_slots: Number of slots by host, as Horovod's discovery returns them.
    """
    local = sum(slots for host, slots in host_slots.items() if host in LOCAL_NAMES)
    others = {host: slots for host, slots in host_slots.items() if host not in LOCAL_NAMES}
    return {**dict.fromkeys(local_names(local), 1), **others}


def slot_of(name: str) -> int | None:
    """Return the index of a name in :func:`local_names`, or None for other names."""
    found = re.fullmatch(r"127\.0\.0\.(0*)1", name)
    return len(found.group(1)) if found else None


@dataclass(frozen=True)
class LauncherRank:
    """This process among the ``size`` that the launcher started; ``job`` is equal on all of them."""

    rank: int
    size: int
    local_rank: int
    job: str


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def find_launcher_rank(environment: Mapping[str, str]) -> LauncherRank | None:
    """Return the rank of this process from the launcher's environment, or None when no launcher started it.

    Raises:
        UsageError: the launcher's variables contradict each other.
    """
    for rank_name, sizes, local_ranks, jobs in _LAUNCHERS:
        if (rank := environment.get(rank_name)) is None:
            continue
        size, local_rank = _first(environment, sizes), _first(environment, local_ranks) or "0"
        if size is None or not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
            raise UsageError(f"{rank_name}={rank!r}: expected a number below {sizes[0]}. Received: {size!r}.")
        known = [environment.get(name, "") for name in (*jobs, *_ATTEMPT)]
        job = "/".join((rank_name, *known, size))
        return LauncherRank(int(rank), int(size), int(local_rank) if local_rank.isdigit() else 0, job)
    return None


def find_world(environment: Mapping[str, str]) -> LauncherRank | None:
    """Return the rank of this process among several that one launcher started, or None when it was started alone.

    A Slurm batch script has rank variables too, but only ``srun`` starts a process per task.
    """
    if "SLURM_STEP_NUM_TASKS" not in environment:
        environment = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    place = find_launcher_rank(environment)
    return place if place is not None and place.size > 1 else None
