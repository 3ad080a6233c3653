"""Core of one job: the state that its messages read and change."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.errors import ProtocolError
from nfdt.core.jobs.admission import read_manifest
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.artifacts import artifact_names
from nfdt.jobserver.client_control import ClientControl
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.mailbox import Mailbox
from nfdt.jobserver.ring_makers import make_rings
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.topologies import topology_class
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import dump_state_parts, load_state


def merger_of(manifest: Manifest, artifacts: ArtifactStore) -> StateMerger:
    """Return the merger with the initial untrained state of a program.

    Raises:
        ProtocolError: The program's state lacks an untrained variable that the program names.
    """
    entries = manifest.untrained
    if not entries:
        return StateMerger()
    found = load_state(artifacts.path(manifest.state)).untrained
    missing = [entry.get("path", i) for i, entry in enumerate(entries) if i not in found]
    if missing:
        raise ProtocolError(f"The program's state lacks {len(missing)} untrained variables, first {missing[0]!r}.")
    return StateMerger(manifest.untrained_rules, [found[i] for i in range(len(entries))])


class StateComposer:
    """Writer of the state of a job, which it can also replace; the same moment is written once.

    Args:
        shards: Client of the job's shards.
        merger: Merger of the untrained state.
        artifacts: Store of files.
    """

    def __init__(self, shards: ShardClients, merger: StateMerger, artifacts: ArtifactStore) -> None:
        self._shards, self._merger, self._artifacts = shards, merger, artifacts
        self._lock = threading.Lock()
        self._moment: object = None
        self._artifact = ""

    def compose(self, moment: object) -> str:
        """Return the artifact of the state at this moment; equal moments give the same one without reading shards."""
        with self._lock:
            if moment != self._moment or not self._artifacts.has(self._artifact):
                state = self._shards.read()
                untrained = dict(enumerate(self._merger.current))
                parts = dump_state_parts(state.weights, state.optimizer, untrained, self._merger.metrics)
                self._artifact = self._artifacts.put(*parts)
                self._moment = moment
            return self._artifact

    def replace(self, artifact: str) -> None:
        """Replace the job's state by an artifact that a client uploaded.

        Raises:
            ProtocolError: The artifact is no state, or the state of another model.
        """
        with self._lock:
            state = load_state(self._artifacts.path(artifact))
            if state.untrained:
                self._merger.check(state.untrained)
            self._shards.write(state)
            if state.untrained:
                self._merger.replace([state.untrained[i] for i in range(len(state.untrained))])
            self._moment = None


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

    @property
    def standing(self) -> bool:
        """Whether no worker trains: between epochs, or while one is paused."""
        return self.between_epochs or self.coordinator.standing


@dataclass
class JobCore(JobParts):
    """Core of one job: its parts and its state. Only messages and the job's own thread use what changes.

    Attributes:
        control: Requests of the clients.
        topology: Topology of the job; another one after a switch.
        training: Parts that exist once the shards serve; None before.
        shard_statistics: Statistics of each shard at the end of the last epoch.
        readers: Number of clients that read or write the state; no epoch begins in the meantime.
        ended: Whether the job is over.
    """

    control: ClientControl
    topology: Topology = field(init=False)
    training: ActiveTraining | None = None
    shard_statistics: list[Mapping[str, Any]] = field(default_factory=list)
    readers: int = 0
    ended: bool = False

    @property
    def spec(self) -> JobSpec:
        """Current specification of the job."""
        return self.topology.spec

    def set_learning_rate(self, training: ActiveTraining, value: float) -> None:
        """Set the learning rate of the user's optimizer, on the shards or in the workers; a slow call."""
        if not self.topology.set_learning_rate(value):
            training.shards.set_learning_rate(value)

    def write(self, training: ActiveTraining, artifact: str) -> None:
        """Replace the state by an artifact; shards that are restored afterwards begin with it as well. A slow call."""
        mailbox, slots, stored = self.mailbox, self.slots, False
        while not stored:
            incarnation = mailbox.read(lambda: slots.incarnation)
            training.composer.replace(artifact)
            stored = training.recovery is None or training.recovery.renew(incarnation) or self.ended

    def replace(self, training: ActiveTraining, artifact: str) -> None:
        """Replace the state by an artifact that a client uploaded, from which a restarted server goes on, too."""
        self.write(training, artifact)
        coordinator = training.coordinator

        def note() -> tuple[bool, int]:
            coordinator.replaced()
            return training.between_epochs, coordinator.epochs_ended

        between, epochs = self.mailbox.handle(note)
        if between and not self.server.embedded:
            self.job_log.checkpoint(artifact, epochs)


def make_core(
    server: ServerContext, job_id: str, spec: JobSpec, session: str, control: ClientControl | None = None
) -> JobCore:
    """Return the core of a job that waits for its slots.

    Args:
        server: The server.
        job_id: The job.
        spec: Specification of the job.
        session: Client session; slots that have run its code serve no other.
        control: Requests of the clients in an earlier run of the job; None: there was none.

    Raises:
        NfdtError: The program's manifest cannot be read.
    """
    manifest, fetchable, kind = read_manifest(spec, server.artifacts), artifact_names(spec), topology_class(spec)
    keep = frozenset({*fetchable, manifest.state})
    job_log = JobLog(server.store, server.artifacts, job_id, keep, server.clock)
    mailbox, portable = Mailbox(server.clock), not (spec.code or manifest.tables)
    wanted = kind.view.slots_wanted(spec)
    slots = JobSlots(server, job_id, spec, session, secrets.token_hex(32), wanted, portable=portable)
    rings = make_rings(slots, job_log, mailbox.end)
    control = control or ClientControl(spec.attended, server.clock.now())
    core = JobCore(server, job_id, slots, job_log, fetchable, rings, mailbox, manifest, control)
    core.topology = kind(core, spec)
    return core
