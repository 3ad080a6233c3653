"""One job from its submission to its end, on its own thread."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import NfdtError
from nfdt.core.host.machine import give_back_memory
from nfdt.core.jobs.feed import BatchFeed
from nfdt.core.jobs.runner import JobMeasures
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import jobs_pb2
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.client_control import ClientControl
from nfdt.jobserver.client_requests import ClientRequests
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_context import ActiveTraining, JobContext
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slot import ShardState
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.outcome import JobOutcome, PartLost, outcome_of
from nfdt.jobserver.pool_slot import PoolSlot, SlotMessageKind
from nfdt.jobserver.shard_clients import ShardClients, connect_shards
from nfdt.jobserver.slot_events import SlotEvents
from nfdt.jobserver.snapshots import StateComposer, merger_of
from nfdt.jobserver.termination import ServerStopping
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.training_loop import TrainingLoop
from nfdt.jobserver.worker_calls import WorkerCalls

_log = logging.getLogger(__name__)


class Job:
    """One submitted job. Public methods may be called from any thread.

    Args:
        server: The server.
        job_id: The job.
        spec: Specification of the job.
        session: Client session; slots that have run its code serve no other.
        control: Requests of the clients in an earlier run of the job; None: there was none.

    Attributes:
        job_id: The job.
        thread: Thread that runs the job; started once the job has its slots.
        broken_off: Reason why the run has ended although the job can go on; "" for none.
    """

    def __init__(
        self, server: ServerContext, job_id: str, spec: JobSpec, session: str, control: ClientControl | None = None
    ) -> None:
        self.job_id = job_id
        self.broken_off = ""
        self._context = JobContext(server, job_id, spec, session, self._on_slot, control)
        self._slot_events = SlotEvents(self._context)
        self._workers = WorkerCalls(self._context)
        self._clients = ClientRequests(self._context)
        self.thread = threading.Thread(target=self._run, name=job_id, daemon=True)

    # ---- parts

    @property
    def spec(self) -> JobSpec:
        """Current specification of the job."""
        return self._context.spec

    @property
    def manifest(self) -> Any:
        """Manifest of the job's program."""
        return self._context.manifest

    @property
    def artifacts(self) -> set[str]:
        """Names of the artifacts that the job's slots may fetch."""
        return self._context.artifacts

    @property
    def feed(self) -> BatchFeed:
        """Entry for the client's batches."""
        return self._context.feed

    @property
    def job_log(self) -> JobLog:
        """Events and results of the job."""
        return self._context.job_log

    @property
    def slots(self) -> JobSlots:
        """Slots of the job."""
        return self._context.slots

    @property
    def control_of_clients(self) -> ClientControl:
        """Requests of the job's clients."""
        return self._context.control

    @property
    def topology(self) -> Topology:
        """Topology of the job."""
        return self._context.topology

    # ---- slots

    def acquire(self, shards: int, workers: int) -> None:
        """Take the initial slots of the job."""
        with self._context.changed:
            self.slots.acquire_shards(shards)
            self.slots.acquire_workers(workers)

    def _on_slot(self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None) -> None:
        self._slot_events.receive(slot, kind, message)

    def next(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply:
        """Answer a worker; see :meth:`WorkerCalls.next`."""
        return self._workers.next(request, alive)

    def long_reply(self, request: pb.FetchReplyRequest) -> bytes:
        """Return a long answer; see :meth:`WorkerCalls.long_reply`."""
        return self._workers.long_reply(request)

    def take_rows(self, request: pb.TakeRowsRequest) -> pb.TakeRowsReply:
        """Give a worker rows; see :meth:`WorkerCalls.take_rows`."""
        return self._workers.take_rows(request)

    # ---- clients

    def watching(self, change: int, session: str) -> None:
        """Add ``change`` to the number of clients that watch the job."""
        self._clients.watching(change, session)

    def check_free(self, session: str) -> None:
        """Raise JobTaken if the client of another session is attached to the job."""
        self._clients.check_free(session)

    def control(self, request: jobs_pb2.ControlRequest) -> None:
        """Execute an action of a client; see :meth:`ClientRequests.control`."""
        self._clients.control(request)

    def measures(self) -> JobMeasures | None:
        """Return the numbers of the job, or None if it does not train."""
        context = self._context
        with context.changed:
            if context.training is None or context.ended:
                return None
            return JobMeasures(context.training.coordinator.waiting_tasks, tuple(context.shard_statistics))

    def snapshot(self) -> jobs_pb2.SnapshotReply:
        """Return the job's state; see :meth:`ClientRequests.snapshot`."""
        return self._clients.snapshot()

    # ---- end

    def stopped_by(self) -> BaseException | None:
        """Return the reason why the job ends before it has begun, or None."""
        with self._context.changed:
            return self._context.termination.cause

    def store_progress(self) -> None:
        """Store the state of the shards, so that the next server leases nothing twice; does nothing without shards."""
        with self._context.changed:
            training = None if self._context.ended else self._context.training
        if training is not None and training.recovery is not None:
            with contextlib.suppress(NfdtError):  # the next server goes on from the snapshot before
                training.recovery.take()

    def stop_with_server(self) -> None:
        """End the job because the server stops."""
        with self._context.changed:
            self._context.termination.end(ServerStopping())

    def close(self, outcome: JobOutcome | None) -> None:
        """Release all resources, then write the outcome of the job; each step runs even if an earlier one fails.

        Args:
            outcome: Last state of the job; None: the job goes on later, and no end is written.
        """
        with contextlib.ExitStack() as last_things:
            last_things.callback(self.job_log.end, outcome)
            last_things.callback(self._release, usable=outcome is not None and outcome.state != "failed")
            if outcome is not None:
                self.topology.report()

    def _release(self, *, usable: bool) -> None:
        context = self._context
        with context.changed:
            context.ended = True
            context.topology.close()
            context.changed.notify_all()
        context.slots.release_all()
        if context.rings is not None:
            context.rings.release(usable=usable)
        if context.training is not None:
            context.training.shards.close()

    def _run(self) -> None:
        outcome: JobOutcome | None = None
        try:
            training = start_training(self._context)
            TrainingLoop(self._context, training).run()
            outcome = JobOutcome("succeeded")
        except BaseException as error:
            outcome = self._outcome_of(error)
        self.close(outcome)
        give_back_memory()

    def _outcome_of(self, error: BaseException) -> JobOutcome | None:
        if not isinstance(error, (NfdtError, ServerStopping)):
            _log.exception("job %s", self.job_id)
        reason = self.topology.explain(self._context.termination.reason_behind(error))
        if isinstance(reason, PartLost):
            self.broken_off = str(reason)
        return None if isinstance(reason, (PartLost, ServerStopping)) else outcome_of(reason)


def start_training(context: JobContext) -> ActiveTraining:
    """Start a job whose slots are available.

    Raises:
        JobFailed: A part does not start in time.
    """
    context.job_log.begin(JobOutcome("starting"))
    context.job_log.record("data", {"where": context.spec.train.where, "reason": context.spec.train.reason})
    begun = context.spec.fit.begun
    with context.changed:
        context.slots.shard_state = ShardState(records=begun.records if begun is not None else "")
        for job_slot in context.slots.shards:
            context.slots.start_shard(job_slot)
        context.wait_for(lambda: [job_slot.name for job_slot in context.slots.shards if not job_slot.address])
        context.topology.form()
    training = _assemble(context)
    with context.changed:
        context.training = training
        rate, weights = context.control.learning_rate, context.control.weights
        if context.spec.callbacks is not None:  # no client sets the rate of such a job
            rate = context.spec.callbacks.learning_rate
        context.control.weights = None
    if weights is not None:
        context.replace_state(training, weights)
    if rate is not None:
        context.set_learning_rate(training, rate)
    with context.changed:
        context.slots.admit(context.slots.living(), training.coordinator)
    context.job_log.begin(JobOutcome("running"))
    return training


def _assemble(context: JobContext) -> ActiveTraining:
    server, topology = context.server, context.topology
    merger = merger_of(context.manifest, server.artifacts)
    policy = topology.view.policy(topology.spec)
    spec = topology.coordinator_spec().model_copy(update={"attended": True})  # the job permits each epoch
    coordinator = Coordinator(spec, policy, context.clock, merger, topology.sizes, restorable=topology.restores)
    shards = topology.connect(lambda: _connect(context), coordinator)
    composer = StateComposer(shards, merger, server.artifacts)
    return ActiveTraining(shards, composer, coordinator, topology.recovery)


def _connect(context: JobContext) -> ShardClients:
    addresses = [job_slot.address for job_slot in context.slots.shards]
    return connect_shards(addresses, context.manifest, context.slots.shard_key, authority=context.slots.shard_ca)
