"""State that the threads of one job share."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.effect_queue import STALL_AFTER_S
from nfdt.coordinator.progress import StallWatch
from nfdt.core.errors import JobFailed, NotStored
from nfdt.core.jobs.admission import read_manifest
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.artifacts import artifact_names
from nfdt.jobserver.client_control import ClientControl
from nfdt.jobserver.client_feed import ClientFeed
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.full_disk import LIMIT_S, PAUSE_S, DiskPatience
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.pool_slot import PoolSlot, SlotListener, SlotMessageKind
from nfdt.jobserver.ring_makers import make_rings
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.slot_notes import SlotNotes
from nfdt.jobserver.snapshots import StateComposer
from nfdt.jobserver.termination import Termination
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.context import TopologyContext
from nfdt.jobserver.topologies.registry import topology_class
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery

START_POLL_S = 0.2  # interval of checks for the parts that must start
START_TIMEOUT_S = 180.0  # limit for shards, and for the rings of groups


@dataclass(frozen=True)
class ActiveTraining:
    """Parts of a job that exist once its shards serve; ``recovery`` only if lost shards are restored."""

    shards: ShardClients
    composer: StateComposer
    coordinator: Coordinator
    recovery: ShardRecovery | None

    @property
    def between_epochs(self) -> bool:
        """Whether no epoch is running."""
        return self.coordinator.phase in ("hold", "ended")


class JobContext:
    """Parts of one job, shared by its own thread, the threads of its slots and those of its clients.

    Args:
        server: The server.
        job_id: The job.
        spec: Specification of the job.
        session: Client session; slots that have run its code serve no other.
        listener: Called for each message of the job's slots.
        control: Requests of the clients in an earlier run of the job; None: there was none.

    Attributes:
        server: The server.
        job_id: The job.
        manifest: Manifest of its program.
        artifacts: Names of the artifacts that its slots may fetch.
        job_log: Events and results of the job.
        notes: Output and spans of its processes.
        token: Key of the job: shards get it, workers get tokens derived from it.
        slots: Slots of the job.
        rings: Maker of the job's rings; None if the server can make none.
        topology: Topology of the job; another one after a switch.
        feed: Entry for the client's batches.
        changed: Condition that guards the attributes below, ``slots`` and the coordinator.
        termination: Reason for the end of the job, once there is one.
        control: Requests of the clients.
        training: Parts that exist once the shards serve; None before.
        shard_statistics: Statistics of each shard at the end of the last epoch.
        readers: Number of clients that read or write the state; no epoch begins in the meantime.
        ended: Whether the job is over.
    """

    def __init__(
        self,
        server: ServerContext,
        job_id: str,
        spec: JobSpec,
        session: str,
        listener: SlotListener,
        control: ClientControl | None = None,
    ) -> None:
        self.server, self.clock, self.job_id = server, server.clock, job_id
        self.manifest = read_manifest(spec, server.artifacts)
        self.artifacts = artifact_names(spec)
        keep = frozenset({*self.artifacts, self.manifest.state})
        self.job_log = JobLog(server.store, server.artifacts, job_id, keep, self.clock)
        self.notes = SlotNotes(server.store, job_id, self.job_log)
        self.token = secrets.token_hex(32)
        self.changed = threading.Condition()
        self.termination = Termination(self.changed, self.clock)
        self.control = control or ClientControl(spec.attended, self.clock.now())
        self.training: ActiveTraining | None = None
        self.shard_statistics: list[Mapping[str, Any]] = []
        self.readers = 0
        self.ended = False
        self.feed = ClientFeed(
            self.changed,
            coordinator=lambda: self.training.coordinator if self.training is not None else None,
            has_ended=lambda: self.ended,
            fail=self.termination.end,
        )
        kind = topology_class(spec)
        self.slots = JobSlots(
            server,
            job_id,
            spec,
            session,
            self.token,
            listener,
            kind.view.slots_wanted(spec),
            portable=not (spec.code or self.manifest.tables),
            noted=self._note,
        )
        self.rings = make_rings(server, job_id, spec, self.slots, self.job_log, self.notes, self._fail_from_outside)
        self.topology: Topology = kind(self._topology_context(), spec)

    def _topology_context(self) -> TopologyContext:
        return TopologyContext(
            self.server,
            self.job_id,
            self.slots,
            self.job_log,
            self.artifacts,
            self.rings,
            self.changed,
            wait_for=self.wait_for,
            check=self.termination.check,
            fail=self.termination.end,
        )

    def _note(self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None) -> None:
        with self.changed:
            job_slot = self.slots.job_slot_of(slot)
        if job_slot is not None and message is not None:
            self.notes.receive(job_slot.name, message)

    def _fail_from_outside(self, error: BaseException) -> None:
        """End the job; for threads that do not hold ``changed``."""
        with self.changed:
            self.termination.end(error)

    @property
    def spec(self) -> JobSpec:
        """Current specification of the job."""
        return self.topology.spec

    def wait_for(self, missing: Callable[[], list[str]]) -> None:
        """Wait until ``missing`` returns no parts; ``changed`` is held, and released between two checks.

        Raises:
            JobFailed: The time limit has passed.
        """
        deadline = self.clock.now() + START_TIMEOUT_S
        stall = StallWatch(self.clock.now(), STALL_AFTER_S)
        while waiting := missing():
            self.termination.check()
            self.job_log.retry()
            now = self.clock.now()
            if now >= deadline:
                raise JobFailed(f"{', '.join(waiting)} did not come up within {START_TIMEOUT_S:.0f} s; see its log.")
            if (since := stall.stalled_s(now)) is not None:
                self.job_log.stalled(waiting, since)
            self.changed.wait(START_POLL_S)

    def store_state(self, training: ActiveTraining, moment: object) -> str:
        """Return the artifact of the state, which does not change meanwhile; see :meth:`store`."""
        return self.store(lambda: training.composer.compose(moment))

    def store(self, write: Callable[[], str]) -> str:
        """Return the artifact that ``write`` stores; wait for room on a full disk.

        Raises:
            NotStored: The disk was full for too long.
        """
        patience = DiskPatience(self.job_id, self.clock)
        while True:
            try:
                return write()
            except NotStored as error:
                if patience.failure(error):
                    self.job_log.write("warning", f"{error} Training waits until then, up to {LIMIT_S:.0f} s.")
                patience.check(error)
            with self.changed:
                self.changed.wait_for(self.termination.check, PAUSE_S)

    def replace_state(self, training: ActiveTraining, artifact: str) -> None:
        """Replace the state by an artifact that a client uploaded; a restarted server begins with it as well."""
        stored = False
        while not stored:
            with self.changed:
                incarnation = self.slots.incarnation
            training.composer.replace(artifact)
            stored = training.recovery is None or training.recovery.renew(incarnation) or self.ended
        with self.changed:
            training.coordinator.replaced()
            epochs = training.coordinator.epochs_ended
            between = training.between_epochs
        if between and self.server.keeps_checkpoints:
            self.job_log.checkpoint(artifact, epochs)

    def set_learning_rate(self, training: ActiveTraining, value: float) -> None:
        """Set the learning rate of the user's optimizer, on the shards or in the workers."""
        if not self.topology.set_learning_rate(value):
            training.shards.set_learning_rate(value)
