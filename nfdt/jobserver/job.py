"""One job from its submission to its end, on its own thread."""

from __future__ import annotations

import contextlib
import logging
import threading

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import NfdtError
from nfdt.core.host.machine import give_back_memory
from nfdt.core.jobs.runner import JobMeasures
from nfdt.core.specs.job import JobSpec
from nfdt.jobserver.client_requests import ClientFeed, ClientRequests
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job_core import ActiveTraining, ClientControl, JobCore, StateComposer, make_core, merger_of
from nfdt.jobserver.job_slot import ShardState
from nfdt.jobserver.mailbox import POLL_S, ServerStopping
from nfdt.jobserver.outcome import JobOutcome, PartLost, outcome_of
from nfdt.jobserver.training_loop import TrainingLoop
from nfdt.jobserver.waiting_calls import WaitingCalls
from nfdt.jobserver.worker_calls import SlotEvents, WorkerCalls

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
        mailbox: Messages of the job.
        core: Core of the job, with its topology and slots.
        workers: Calls of its workers.
        clients: Requests of its clients.
        feed: Entry for the client's batches.
        job_log: Events and results of the job.
        thread: Thread that runs the job; started once the job has its slots.
        broken_off: Reason why the run has ended although the job can go on; "" for none.
    """

    def __init__(
        self, server: ServerContext, job_id: str, spec: JobSpec, session: str, control: ClientControl | None = None
    ) -> None:
        self.job_id = job_id
        self.broken_off = ""
        self.core = make_core(server, job_id, spec, session, control)
        self.mailbox, self.job_log = self.core.mailbox, self.core.job_log
        self.core.slots.listen(SlotEvents(self.core).receive)
        self.workers = WorkerCalls(self.core)
        self.calls = WaitingCalls(self.core, self.workers)
        self.clients = ClientRequests(self.core)
        self.feed = ClientFeed(self.core)
        self.thread = threading.Thread(target=self._run, name=job_id, daemon=True)

    @property
    def spec(self) -> JobSpec:
        """Current specification of the job."""
        return self.core.spec

    def acquire(self, shards: int, workers: int) -> None:
        """Take the initial slots of the job."""
        slots = self.core.slots
        self.mailbox.handle(lambda: (slots.acquire_shards(shards), slots.acquire_workers(workers)))

    def measures(self) -> JobMeasures | None:
        """Return the numbers of the job, or None if it does not train."""
        core, training = self.core, self.core.training
        if training is None or core.ended:
            return None
        return self.mailbox.read(lambda: JobMeasures(training.coordinator.waiting_tasks, tuple(core.shard_statistics)))

    def remaining_s(self) -> float | None:
        """Estimate the seconds until the end of its last epoch; None before the end of the first one."""
        training = self.core.training
        if training is None or self.core.ended:
            return None

        def estimate() -> float | None:
            coordinator = training.coordinator
            return coordinator.epoch_s * (self.spec.fit.epochs - coordinator.epochs_ended) or None

        return self.mailbox.read(estimate)

    # ---- end

    def store_progress(self) -> None:
        """Store the state of the shards, so that the next server leases nothing twice; does nothing without shards."""
        training = None if self.core.ended else self.core.training
        if training is not None and training.recovery is not None:
            with contextlib.suppress(NfdtError):  # the next server goes on from the snapshot before
                training.recovery.store_snapshot()

    def stop_with_server(self) -> None:
        """End the job because the server stops."""
        self.mailbox.end(ServerStopping())

    def close(self, outcome: JobOutcome | None) -> None:
        """Release all resources, then write the outcome of the job; each step runs even if an earlier one fails.

        Args:
            outcome: Last state of the job; None: the job goes on later, and no end is written.
        """
        with contextlib.ExitStack() as last_things:
            last_things.callback(self.job_log.end, outcome)
            last_things.callback(self._release, usable=outcome is not None and outcome.state != "failed")
            if outcome is not None:
                self.core.topology.report()

    def _release(self, *, usable: bool) -> None:
        core = self.core

        def end() -> None:
            core.ended = True
            core.topology.close()

        self.mailbox.handle(end)
        core.slots.release_all()
        if core.rings is not None:
            core.rings.release(usable=usable)
        if core.training is not None:
            core.training.shards.close()

    def _run(self) -> None:
        outcome: JobOutcome | None = None
        try:
            self.mailbox.claim_thread()
            TrainingLoop(self.core, start_training(self.core)).run()
            outcome = JobOutcome("succeeded")
        except BaseException as error:
            outcome = self._outcome_of(error)
        self.close(outcome)
        give_back_memory()

    def _outcome_of(self, error: BaseException) -> JobOutcome | None:
        if not isinstance(error, (NfdtError, ServerStopping)):
            _log.exception("job %s", self.job_id)
        reason = self.core.topology.explain(self.mailbox.reason_behind(error))
        if isinstance(reason, PartLost):
            self.broken_off = str(reason)
        return None if isinstance(reason, (PartLost, ServerStopping)) else outcome_of(reason)


def start_training(core: JobCore) -> ActiveTraining:
    """Start a job whose slots are available.

    Raises:
        JobFailed: A part does not start in time.
    """
    mailbox, slots, spec = core.mailbox, core.slots, core.spec
    core.job_log.enter("starting")
    core.job_log.record("data", {"where": spec.train.where, "reason": spec.train.reason})

    def start_shards() -> None:
        slots.shard_state = ShardState(records=spec.fit.begun.records if spec.fit.begun is not None else "")
        for job_slot in slots.shards:
            slots.start_shard(job_slot)
        core.wait_for(lambda: [job_slot.name for job_slot in slots.shards if not job_slot.address])
        core.topology.form()

    mailbox.handle(start_shards)
    training = _assemble(core)

    def begin() -> tuple[float | None, str | None]:
        core.training = training
        weights, core.control.weights = core.control.weights, None
        if spec.callbacks is not None:  # no client sets the rate of such a job
            return spec.callbacks.learning_rate, weights
        return core.control.learning_rate, weights

    def admit() -> bool | None:
        mailbox.check()
        if training.recovery is not None and training.recovery.running:
            return None  # lost shards have no addresses yet
        mailbox.handle(lambda: slots.admit(slots.living(), training.coordinator))
        return True

    rate, weights = mailbox.handle(begin)
    if weights is not None:
        mailbox.call(lambda: core.replace(training, weights))
    if rate is not None:
        mailbox.call(lambda: core.set_learning_rate(training, rate))
    while mailbox.wait(admit, POLL_S) is None:
        pass
    core.job_log.enter("running")
    return training


def _assemble(core: JobCore) -> ActiveTraining:
    """Connect to the shards, and make the coordinator."""
    topology, artifacts = core.topology, core.server.artifacts
    merger = merger_of(core.manifest, artifacts)
    spec = topology.coordinator_spec().model_copy(update={"attended": True})  # the job permits each epoch
    policy = topology.view.policy(topology.spec)
    coordinator = Coordinator(spec, policy, core.server.clock, merger, topology.sizes, restorable=topology.restores)

    shards = topology.connect(coordinator)
    recovery = topology.recovery

    def stored() -> str:
        passed = core.mailbox.read(lambda: coordinator.passed)
        return recovery.present_state() if passed and recovery is not None else ""

    return ActiveTraining(shards, StateComposer(shards, merger, artifacts, stored), coordinator, recovery)
