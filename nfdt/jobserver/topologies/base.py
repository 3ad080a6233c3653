"""Base class of topologies: start, connection, replacement and configuration of one job's workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import TopologyView
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.slot_rings import admit_rings
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery
from nfdt.jobserver.topologies.slot_supply import SlotNeed, check_supply
from nfdt.schedulers.group_shares import FixedSizes


class Topology(ABC):
    """Topology that runs the workers of one job. Subclasses override the hooks that they need.

    The job calls :meth:`start` until its slots are registered, then :meth:`form`, :meth:`connect` and
    :meth:`coordinator_spec` once, then the other methods during training. Only messages call methods that read or
    change the job's state; :meth:`connect`, :meth:`review` and :meth:`explain` wait, on the job's own thread.

    Attributes:
        view: Pure properties of the topology.
        parts: Parts of the job.
        spec: Current specification of the job.
        sizes: Batch sizes that the topology sets itself; None: the batch policy of the algorithm sets them.
        restores: Whether lost shards are restored; otherwise the loss of a shard ends the run.
        recovery: Snapshots of the shards, and their restoration; None before :meth:`connect`.
    """

    view: ClassVar[TopologyView]
    parts: JobParts
    spec: JobSpec
    sizes: FixedSizes | None = None
    restores: ClassVar[bool] = False
    recovery: ShardRecovery | None = None

    def __init__(self, parts: JobParts, spec: JobSpec) -> None:
        self.parts, self.spec = parts, spec

    @classmethod
    def admit(cls, server: ServerContext, spec: JobSpec) -> None:
        """Refuse a job that this server can never run.

        Raises:
            UsageError: A requirement of the topology is missing here.
            PolicyRefused: The job requests more than this server allows.
        """
        if cls.view.launched:
            admit_rings(server, spec)

    # ---- start

    @abstractmethod
    def start(self, shards: int) -> None:
        """Start processes for ``shards`` shards and for the workers in the background; can be called again.

        Raises:
            JobFailed: A process has ended that cannot be replaced.
        """

    @property
    def least_workers(self) -> int:
        """Number of workers with which the job may begin and go on."""
        return self.parts.slots.wanted

    @property
    def awaited_slots(self) -> int:
        """Number of worker slots for ranks that the job waits for before its leaders can register; 0 for none."""
        return 0

    def give_up(self, short: Sequence[SlotNeed], *, late: bool) -> None:
        """End a job that cannot get its slots. Ranks can begin only together, other workers with what is there.

        Args:
            short: Needs for which too few slots are registered.
            late: Whether the job's time limit for its start has passed.

        Raises:
            JobFailed: No more slots can be expected.
        """
        check_supply(self.parts, short, late=late, all_at_once=self.view.launched)

    def form(self) -> None:
        """Start the parts that are required before training."""
        return None

    def connect(self, coordinator: Coordinator) -> ShardClients:
        """Return the client of the shards for the whole training."""
        return self.parts.connect_shards()

    def coordinator_spec(self) -> JobSpec:
        """Return the specification for the coordinator, with the current number of workers."""
        count = max(1, len(self.parts.slots.living()))
        spec = self.view.effective_spec(self.spec, groups=count)
        cluster = spec.cluster.model_copy(update={"workers": count})
        return spec.model_copy(update={"cluster": cluster})

    # ---- training

    def report(self) -> None:
        """Copy new messages of launched processes into the job's log."""
        return None

    @abstractmethod
    def replace_lost(self, coordinator: Coordinator, now: float) -> None:
        """Replace lost workers, or fail the job when none is left; called once a second."""

    def lost(self, job_slot: JobSlot, how: str, *, killed: bool = False) -> bool:
        """Handle the end of a slot's process, with its reason; ``killed``: by a signal that no process survives.

        Returns:
            Whether another process takes over, so that the slot's position in the job remains.
        """
        return False

    def prepare_epoch(self, coordinator: Coordinator) -> bool:
        """Return whether the next epoch may begin; set its batch sizes if they depend on the workers."""
        return True

    def review(self, coordinator: Coordinator, shards: ShardClients, remaining_s: float) -> Topology:
        """Adapt to measured speeds between two epochs.

        Returns:
            Topology with which the job continues.
        """
        return self

    def share(self, worker: str) -> pb.GroupShare | None:
        """Return a worker's share of the work in its next epoch; None: the worker decides itself."""
        return None

    # ---- end

    def explain(self, error: BaseException) -> BaseException:
        """Return a better reason for the end of the job, if launched processes reported one."""
        return error

    def close(self) -> None:
        """End the job's background work."""
        return None
