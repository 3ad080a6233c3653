"""Check that a server's slots and memory suffice for a job's lower bounds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.coordinator.topology_view import TopologyView
from nfdt.core.errors import UsageError
from nfdt.core.specs.job import JobSpec

LEAST_SHARDS = 8
SHARDS_PER_CORE = 2
WORKER_COPIES = 3  # weights, gradient, and the reply of the shards
SERVER_COPIES = 2  # the state as read from the shards, and as written to disk
GIGABYTE = 2**30


@dataclass(frozen=True)
class Capacity:
    """Resources of a server.

    Attributes:
        cores: Number of cores of its machine.
        memory_bytes: Memory of its machine.
        workers: Maximum number of worker slots; None: any number, because they are external or started on demand.
        local: Whether workers run on this machine.
        offered_shards: Number of shard slots on other machines.
        launches_ranks: Whether this machine starts the ranks of the job, beside its slots.
    """

    cores: int
    memory_bytes: int
    workers: int | None
    local: bool
    offered_shards: int = 0
    launches_ranks: bool = True


def check_capacity(spec: JobSpec, view: TopologyView, *, weights_bytes: int, state_bytes: int, here: Capacity) -> None:
    """Refuse a job that could never get its slots, or whose model does not fit.

    Args:
        spec: The job.
        view: Pure properties of its topology.
        weights_bytes: Size of all trainable variables as float32.
        state_bytes: Size of weights, optimizer variables and untrained variables.
        here: Resources of the server.

    Raises:
        UsageError: The job requests more than is possible; the text names the available amount and the remedy.
    """
    launched = view.launched and here.launches_ranks
    if not launched:
        _check_workers(spec.cluster.workers, here)
    if view.pushes:
        _check_shards(spec.cluster.shards, here)
    workers = spec.cluster.workers if here.local or launched else 0
    shards = spec.cluster.shards
    shards_here = max(0, shards - here.offered_shards) / shards if view.pushes else 1.0
    needed = state_bytes * (shards_here + SERVER_COPIES) + workers * WORKER_COPIES * weights_bytes
    if not view.pushes:  # every rank has the optimizer
        needed += workers * (state_bytes - weights_bytes)
    if needed > here.memory_bytes:
        raise UsageError(
            f"The job takes at least {needed / GIGABYTE:.1f} GB of memory on the server's machine: a state of "
            f"{state_bytes / GIGABYTE:.1f} GB, of which {weights_bytes / GIGABYTE:.1f} GB are weights, for its shards, "
            f"and {workers} workers there. Expected: at most {here.memory_bytes / GIGABYTE:.1f} GB, which the machine "
            "has. Ask for fewer workers, let workers on other machines attend with `nfdt worker`, or use a larger one."
        )


def _check_workers(wanted: int, here: Capacity) -> None:
    if here.workers is not None and wanted > here.workers:
        raise UsageError(
            f"workers={wanted}: expected at most {here.workers}, which is how many worker slots this server starts or "
            f"has. Ask for fewer, or add some with `nfdt worker --server HOST:PORT --slots {wanted - here.workers}` "
            "and submit the job again."
        )


def _check_shards(wanted: int, here: Capacity) -> None:
    own = max(LEAST_SHARDS, SHARDS_PER_CORE * here.cores)
    if wanted > own + here.offered_shards:
        raise UsageError(
            f"shards={wanted}: expected at most {own + here.offered_shards}: {own} on this server's machine, which has "
            f"{here.cores} cores, and {here.offered_shards} on others. Ask for fewer, or add some with "
            f"`nfdt worker --server HOST:PORT --shards {wanted - own - here.offered_shards}` on another machine."
        )
