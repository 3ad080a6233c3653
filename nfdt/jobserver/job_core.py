"""Core of one job: its parts, and the state that its messages read and change, as the requests of its clients."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.errors import JobTaken, ProtocolError, UsageError
from nfdt.core.jobs.admission import read_manifest
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.sharding import sparse_tables
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.artifacts import artifact_names
from nfdt.jobserver.capacity import MemoryNeed, model_bytes
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.incoming_state import Rest
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_parts import JobParts
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.mailbox import Mailbox
from nfdt.jobserver.shard_clients import ShardClients
from nfdt.jobserver.slot_rings import make_rings
from nfdt.jobserver.topologies import topology_class
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import dump_state_parts, load_state

NO_ARTIFACT = 64 * "0"


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
        stored: Returns the artifact that has the end of the last epoch where the shards have more; else "".
    """

    def __init__(
        self, shards: ShardClients, merger: StateMerger, artifacts: ArtifactStore, stored: Callable[[], str]
    ) -> None:
        self._shards, self._merger, self._artifacts, self._stored = shards, merger, artifacts, stored
        self._lock = threading.Lock()
        self._made: dict[tuple[object, bool], str] = {}  # by moment and whether they are weights only

    def compose(self, moment: object, *, weights_only: bool = False) -> str:
        """Return the artifact of the state at this moment; equal moments give the same one without reading shards."""
        with self._lock:
            for known in ((moment, False), (moment, weights_only)):
                if self._artifacts.has(artifact := self._made.get(known, NO_ARTIFACT)):
                    return artifact
            if isinstance(moment, int) and (stored := self._stored()):
                artifact = self._copy(stored, weights_only=weights_only)
            else:
                rest = Rest(self._merger.current, self._merger.metrics)
                artifact = self._shards.save(self._artifacts, rest, weights_only=weights_only)
            kept = {known: made for known, made in self._made.items() if known[0] == moment}
            self._made = {**kept, (moment, weights_only): artifact}
            return artifact

    def _copy(self, stored: str, *, weights_only: bool) -> str:
        """Store a state again, with the metrics of the epoch."""
        state = load_state(self._artifacts.path(stored))
        optimizer = {} if weights_only else state.optimizer
        parts = dump_state_parts(state.weights, optimizer, state.untrained, self._merger.metrics)
        return self._artifacts.put(*parts)

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
            self._made.clear()


@dataclass
class ClientControl:
    """Requests of the clients of one job, guarded by the job's lock.

    Attributes:
        interactive: Whether a client permits each epoch (an interactive job); False once that client is gone.
        unwatched_since: Time of the last change of ``watchers``.
        permitted: Last epoch that the client permits.
        until: Number of steps of that epoch after which it pauses, as at its end; None: no pause.
        stop_training: Whether the client has requested a clean end of the job; taken once.
        learning_rate: Last learning rate that was set.
        weights: Artifact of the state that was set before training began.
        watchers: Number of clients that watch the job.
        attached: Number of watches of each client session that runs callbacks; more than one while it reconnects.
    """

    interactive: bool
    unwatched_since: float
    permitted: int = -1
    until: int | None = None
    stop_training: bool = False
    learning_rate: float | None = None
    weights: str | None = None
    watchers: int = 0
    attached: Counter[str] = field(default_factory=Counter)

    def watch(self, change: int, now: float, session: str = "") -> None:
        """Add ``change`` to the number of watching clients; one with a session permits the epochs from then on.

        Raises:
            JobTaken: The client of another session does so.
        """
        if session:
            if change > 0:
                self.check_free(session)
                self.interactive = True
            self.attached[session] += change
        self.watchers += change
        self.unwatched_since = now

    def check_free(self, session: str) -> None:
        """Raise JobTaken if the client of another session is attached."""
        if any(count > 0 and one != session for one, count in self.attached.items()):
            raise JobTaken(
                "The job is attached to another script. Expected: one script at a time. End that script first; where "
                "its machine has failed, the server notices within 90 s."
            )

    def permit(self, epoch: int, until: int | None) -> None:
        """Permit an epoch to begin, or to resume after a pause."""
        if epoch >= self.permitted:
            self.permitted, self.until = epoch, until

    def permits(self, epoch: int) -> bool:
        """Whether this epoch may begin."""
        return not self.interactive or self.permitted >= epoch

    def steps_of(self, epoch: int) -> int | None:
        """Return the number of steps after which this epoch pauses, as at its end; None: no pause."""
        return self.until if self.interactive and epoch == self.permitted else None

    def set_learning_rate(self, value: float) -> None:
        """Set another learning rate.

        Raises:
            UsageError: The value is negative, infinite or no number.
        """
        if not 0 <= value < float("inf"):
            raise UsageError(f"learning_rate: expected a number >= 0. Received: {value}.")
        self.learning_rate = value

    def pop_stop(self) -> bool:
        """Return whether the client has requested a clean end; True once per request."""
        wanted, self.stop_training = self.stop_training, False
        return wanted

    def abandoned(self, now: float, timeout_s: float) -> bool:
        """Whether an interactive job has been without a client for too long."""
        return self.interactive and self.watchers <= 0 and now - self.unwatched_since >= timeout_s


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
    def present_state(self) -> str:
        """Artifact of the present state of a job between epochs, if a snapshot of the shards has it; else ""."""
        return self.recovery.present_state() if self.recovery is not None and self.between_epochs else ""

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

    @cached_property
    def may_keep_weights(self) -> bool:
        """Whether shards may keep weights beside those that they train: all weights are exchanged, and there is room.

        A shard keeps them twice for a moment, and what a push changes of the vectors while they are read.
        """
        spec, server = self.spec, self.server
        if sparse_tables(self.manifest, spec.algorithm, spec.cluster.shards):
            return False
        capacity, model = server.capacity(), model_bytes(spec, self.manifest, server.artifacts)
        need = MemoryNeed.of(spec, self.topology.view, model, capacity)
        return need.total + 2 * model.weights <= capacity.memory_bytes

    def set_learning_rate(self, training: ActiveTraining, value: float) -> None:
        """Set the learning rate of the user's optimizer; a slow call."""
        if training.recovery is not None:
            training.recovery.roll_back(f"The learning rate became {value:g}")
        training.shards.set_learning_rate(value)

    def write(self, training: ActiveTraining, artifact: str) -> None:
        """Replace the state by an artifact; shards that are restored afterwards begin with it as well. A slow call."""
        mailbox, slots, stored = self.mailbox, self.slots, False
        if training.recovery is not None:
            training.recovery.roll_back("The state was changed")
            mailbox.handle(training.recovery.outdate)
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
    mailbox, portable = Mailbox(server.clock), not (spec.code or manifest.tables or manifest.mesh)
    wanted = kind.view.slots_wanted(spec)
    slots = JobSlots(server, job_id, spec, session, secrets.token_hex(32), wanted, portable=portable)
    rings = make_rings(slots, job_log, mailbox.end)
    control = control or ClientControl(spec.attended, server.clock.now())
    core = JobCore(server, job_id, slots, job_log, fetchable, rings, mailbox, manifest, control)
    core.topology = kind(core, spec)
    return core
