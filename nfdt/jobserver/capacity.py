"""Whether the resources of a server suffice for a job: slots, memory and room on the disk."""

from __future__ import annotations

from dataclasses import dataclass

from nfdt.coordinator.topology_view import TopologyView, view_of
from nfdt.core.errors import UsageError
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.sharding import held_by_workers
from nfdt.core.specs.job import JobSpec
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import load_state
from nfdt.planning.memory import JobMemory, ModelBytes, estimate, stored_bytes

LEAST_SHARDS = 8
SHARDS_PER_CORE = 2
GIGABYTE = 2**30
REMEDY = (
    "Ask for fewer shards or workers on this machine, let other machines attend with `nfdt worker --slots N --shards "
    "N`, use a larger machine, or an optimizer with fewer variables per weight: SGD has none, Adam two."
)


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
        client: Whether only processes of this machine reach the server, so that scripts run here too.
        disk_bytes: Room for artifacts; None: unknown.
        checkpoints: Whether the server stores the state at the end of each epoch.
    """

    cores: int
    memory_bytes: int
    workers: int | None
    local: bool
    offered_shards: int = 0
    launches_ranks: bool = True
    client: bool = False
    disk_bytes: int | None = None
    checkpoints: bool = True


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that a job needs on the server's machine.

    Attributes:
        processes: Estimate of each process.
        client: Whether its script runs there.
        shards: Number of its shards there.
        workers: Number of its workers there.
    """

    processes: JobMemory
    client: bool
    shards: int
    workers: int

    @classmethod
    def of(cls, spec: JobSpec, view: TopologyView, model: ModelBytes, here: Capacity) -> MemoryNeed:
        """Return the need of a job for a model of this size."""
        workers = spec.cluster.workers if here.local or (view.launched and here.launches_ranks) else 0
        shards = max(0, spec.cluster.shards - here.offered_shards) if view.pushes else 0
        processes = estimate(
            model, spec.algorithm, workers=spec.cluster.workers, shards=spec.cluster.shards, shared=workers > 0
        )
        return cls(processes, here.client and spec.attended, shards, workers)

    @property
    def total(self) -> int:
        """Bytes that all these processes take together at most."""
        return self.processes.on_machine(client=self.client, server=True, shards=self.shards, workers=self.workers)

    def __str__(self) -> str:
        parts = [
            *([f"the script {gigabytes(self.processes.client.peak)}"] if self.client else []),
            f"the server {gigabytes(self.processes.server.peak)}",
            *([f"{self.shards} shards {gigabytes(self.processes.shard.peak)} each"] if self.shards else []),
            *([f"{self.workers} workers {gigabytes(self.processes.worker.peak)} each"] if self.workers else []),
        ]
        return ", ".join(parts)


def describe_need(spec: JobSpec, model: ModelBytes, here: Capacity) -> str:
    """Return what the shards of a job take by the estimate, what the server's machine has, and the remedy."""
    need = MemoryNeed.of(spec, view_of(spec), model, here)
    return (
        f"By the estimate a shard takes up to {gigabytes(need.processes.shard.peak)} of memory, and the job "
        f"{gigabytes(need.total)} on the server's machine, which has {gigabytes(here.memory_bytes)}: {need}. {REMEDY}"
    )


def gigabytes(size: float) -> str:
    """Return a size in GB as text."""
    return f"{size / GIGABYTE:.1f} GB"


def model_bytes(spec: JobSpec, manifest: Manifest, artifacts: ArtifactStore) -> ModelBytes:
    """Return the size of a job's model, whose initial state is stored."""
    layout, owners, state = manifest.layout, list(manifest.optimizer_owners or ()), artifacts.path(manifest.state)
    size, held = layout.size, held_by_workers(manifest, spec.algorithm, spec.cluster.shards).size
    vectors = {index: 4 * layout.slots[index].size for index in manifest.made}
    made = sum(vector * (1 + owners.count(index)) for index, vector in vectors.items())
    lacking = made if made and load_state(state).weights.size != size else 0
    return ModelBytes(4 * size, state.stat().st_size + lacking, 4 * (size - held), sum(vectors.values()), made)


def check_capacity(spec: JobSpec, view: TopologyView, model: ModelBytes, here: Capacity) -> None:
    """Refuse a job that could never get its slots, or whose model does not fit into memory or on the disk.

    Args:
        spec: The job.
        view: Pure properties of its topology.
        model: Size of its model.
        here: Resources of the server.

    Raises:
        UsageError: The job requests more than is possible; the text names the available amount and the remedy.
    """
    if not (view.launched and here.launches_ranks):
        _check_workers(spec.cluster.workers, here)
    if view.pushes:
        _check_shards(spec.cluster.shards, here)
    need = MemoryNeed.of(spec, view, model, here)
    if need.total > here.memory_bytes:
        raise UsageError(
            f"The job takes about {gigabytes(need.total)} of memory on the server's machine, for a model of "
            f"{gigabytes(model.weights)} with a state of {gigabytes(model.state)}: at most {need}. Expected: at most "
            f"{gigabytes(here.memory_bytes)}, which the machine has. {REMEDY}"
        )
    workers, checkpoints = spec.cluster.workers, here.checkpoints
    _check_disk(stored_bytes(model, spec.algorithm, workers, checkpoints=checkpoints), model, here)


def _check_disk(needed: int, model: ModelBytes, here: Capacity) -> None:
    if here.disk_bytes is not None and needed > here.disk_bytes:
        raise UsageError(
            f"The job takes up to {gigabytes(needed)} on the server's disk, for snapshots and checkpoints of a state "
            f"of {gigabytes(model.state)}. Expected: at most {gigabytes(here.disk_bytes)}, for which there is room. "
            "Make room, for example with `nfdt jobs delete ID`, or start the server with another --state-dir."
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
