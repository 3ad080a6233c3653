"""Assignment of slots to jobs in a fair order; a job whose slots do not exist, or without quota, holds up no other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nfdt.coordinator.effect_queue import STALL_AFTER_S
from nfdt.coordinator.progress import StallWatch
from nfdt.core.errors import NfdtError, ServerUnreachable, UsageError
from nfdt.core.jobs.feed import BatchFeed
from nfdt.core.jobs.job_record import is_terminal
from nfdt.core.jobs.runner import JobMeasures, QueuePlace, Role, SlotCounts
from nfdt.core.sharding import count_shards
from nfdt.core.specs.job import EpochProgress, JobSpec, check_groups, parse_job
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire.parsing import Seldom
from nfdt.jobserver.capacity import check_capacity, model_bytes
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.job import Job
from nfdt.jobserver.job_core import ClientControl
from nfdt.jobserver.outcome import outcome_of
from nfdt.jobserver.restart import requeue, requeue_unfinished
from nfdt.jobserver.slot_rings import takes_slots
from nfdt.jobserver.topologies import topology_class
from nfdt.jobserver.topologies.base import Topology
from nfdt.jobserver.topologies.slot_supply import SlotNeed
from nfdt.model.program.manifest import Manifest
from nfdt.schedulers.job_queue import QueuedJob, Quota, expected_starts, fair_order

_log = logging.getLogger(__name__)

REST = 4  # pause after a look at the queue, in times of its duration
DISPATCH_POLL_S = 0.5  # polling interval of the dispatcher without changes
STOP_TIMEOUT_S = 10.0  # limit for each thread when the server stops
PASSED_AFTER_S = 10.0  # time without enough registered slots after which later jobs may pass a waiting one


@dataclass
class _WaitingJob:
    """What the dispatcher knows of a job in the queue.

    Attributes:
        job: The job.
        shards: Number of its shards.
        stall: Watch that reports a long wait in the job's log.
        short_since: Time since which too few slots are registered for it; None: enough are.
        may_be_passed: Whether later jobs may take free slots before it.
    """

    job: Job
    shards: int
    stall: StallWatch
    short_since: float | None = None
    may_be_passed: bool = False


class Scheduler:
    """Scheduler of submitted jobs; a :class:`~nfdt.core.jobs.runner.JobRunner`."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._owners: dict[str, str] = {}
        self._queue: deque[Job] = deque()
        self._waiting: dict[str, _WaitingJob] = {}  # of the dispatcher
        self._told: set[str] = set()  # jobs whose logs say that they wait for their owner's quota
        self._stopping = False
        self._warnings = Seldom(_log)
        self._thread = threading.Thread(target=self._dispatch, name="scheduler", daemon=True)

    def requeue_unfinished(self) -> None:
        """Queue the unfinished jobs of an earlier server. Clients may call afterwards."""
        for job_id in requeue_unfinished(self._server.store, self._server.artifacts):
            self.submitted(job_id)

    def start(self) -> None:
        """Start the dispatcher."""
        self._thread.start()

    def stop(self) -> None:
        """Stop all jobs without storing their end: the next server resumes them."""
        with self._lock:
            self._stopping = True
            jobs = list(self._jobs.values())
        if not self._server.embedded:
            threads = [threading.Thread(target=job.store_progress, daemon=True) for job in jobs]
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + STOP_TIMEOUT_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        for job in jobs:
            job.stop_with_server()
        self._server.pool.wake()
        self._thread.join(STOP_TIMEOUT_S)
        for job in jobs:
            if job.thread.is_alive():
                job.thread.join(STOP_TIMEOUT_S)

    # ---- the Jobs service

    def admit(self, spec: JobSpec, manifest: Manifest) -> None:
        """Refuse a program that cannot be divided into its shards, and a job that this server can never run."""
        try:
            topology = topology_class(spec)
            topology.admit(self._server, spec)
            _count_shards(topology, spec, manifest)
            check_groups(spec.algorithm, spec.cluster)
            here = replace(self._server.capacity(), launches_ranks=not takes_slots(self._server, spec))
            check_capacity(spec, topology.view, model_bytes(spec, manifest, self._server.artifacts), here)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, NfdtError):
                raise
            raise UsageError(f"Program {spec.program}: its manifest is malformed ({error!r}).") from None

    def submitted(self, job_id: str, control: ClientControl | None = None) -> None:
        """Queue a job; ``control`` has the requests of its clients in an earlier run."""
        record = self._server.store.get(job_id)
        try:
            job = Job(self._server, job_id, parse_job(record.spec_json), record.session, control)
        except NfdtError as error:  # an artifact is gone since the last server
            outcome = outcome_of(error)
            self._server.store.transition(job_id, "failed", reason=outcome.reason, error=outcome.error)
            return
        with self._lock:
            self._jobs[job_id], self._owners[job_id] = job, record.owner
            self._queue.append(job)
        self._server.pool.wake()

    def job_of(self, job_id: str) -> Job | None:
        """Return the job of this identifier, if it has not ended."""
        with self._lock:
            return self._jobs.get(job_id)

    def control(self, request: pb.ControlRequest) -> None:
        """Pass a client's action to the job."""
        self._check_serving()
        job = self.job_of(request.job_id)
        if job is not None:
            job.clients.control(request)
            self._server.pool.wake()
        elif not is_terminal(self._server.store.get(request.job_id).state):
            raise UsageError(f"Job {request.job_id} does not run on this server.")

    def _check_serving(self) -> None:
        """Raise ServerUnreachable if the server stops: the next server needs the request."""
        if self._stopping:
            raise ServerUnreachable("The server stops.")

    def snapshot(self, job_id: str, contents: pb.SnapshotRequest.Contents.ValueType) -> pb.SnapshotReply:
        """Return the job's state, with these contents at least."""
        self._check_serving()
        state = self._server.store.get(job_id).state
        job = self.job_of(job_id)
        if job is not None and not is_terminal(state):
            try:
                return job.clients.snapshot(contents)
            except ServerUnreachable:
                record = self._server.store.get(job_id)  # the job may have ended meanwhile
                if not record.result_artifact and not is_terminal(record.state):
                    raise
        record = self._server.store.get(job_id)
        if record.result_artifact:
            return pb.SnapshotReply(artifact=record.result_artifact, epochs=parse_job(record.spec_json).fit.epochs)
        if record.checkpoint_artifact:
            return pb.SnapshotReply(artifact=record.checkpoint_artifact, epochs=record.checkpoint_epochs or 0)
        if record.snapshot_artifact and record.snapshot_json:
            epoch = EpochProgress.model_validate_json(record.snapshot_json).epoch
            return pb.SnapshotReply(artifact=record.snapshot_artifact, epochs=epoch)
        raise UsageError(f"Job {job_id} is {record.state} and left no state.")

    def feed(self, job_id: str) -> BatchFeed:
        """Return the queue of the client's batches."""
        job = self.job_of(job_id)
        if job is None or job.spec.train.kind != "stream":
            raise UsageError(f"Job {job_id} takes no batches: it has ended, or its data are arrays.")
        return job.feed

    def watching(self, job_id: str, change: int, session: str = "") -> None:
        """Add ``change`` to the number of clients that watch the job."""
        job = self.job_of(job_id)
        if job is not None:
            job.clients.watching(change, session)

    def check_free(self, job_id: str, session: str) -> None:
        """Raise JobTaken if the client of another session is attached to the job."""
        job = self.job_of(job_id)
        if job is not None:
            job.clients.check_free(session)

    def slot_counts(self) -> SlotCounts:
        """Return the numbers of registered worker slots."""
        counts = self._server.pool.slot_counts()
        if not self._server.launches_workers:
            return counts
        # The launcher replaces slots by others on the backend that a job needs.
        return replace(counts, versions=tuple({**found, "backend": ""} for found in counts.versions))

    def slots(self, role: Role | None = None) -> list[pb.SlotDescription]:
        """Return all registered slots, or those of a role."""
        return self._server.pool.registered(role)

    def stacks(self, job_id: str, host: str, pid: int) -> str:
        """Return where the threads of a process of a job are."""
        return self._server.pool.stacks(job_id, host, pid)

    def places(self) -> dict[str, QueuePlace]:
        """Return the place of each waiting job in the queue."""
        order, running = self._order()
        with self._lock:
            remaining = [(self._jobs[job.job_id].remaining_s(), job.workers) for job in running]
        ends = [(seconds, workers) for seconds, workers in remaining if seconds is not None]
        starts = expected_starts(order, self._free_workers(running), ends)
        return {job.job_id: QueuePlace(at, starts[job.job_id]) for at, job in enumerate(order, start=1)}

    def workers_wanted(self) -> int:
        """Return the number of workers of the running jobs, and of those waiting ones that the quotas admit."""
        order, running = self._order()
        for job in order:
            if self._server.quotas.get(job.owner, Quota()).admits(job, running):
                running = [*running, job]
        return sum(job.workers for job in running)

    def _free_workers(self, running: Sequence[QueuedJob]) -> int:
        """Return the number of worker slots that are free, or would be started."""
        most = self._server.most_workers
        if not self._server.launches_workers:
            return self._server.pool.slot_counts().free
        return 2**20 if most is None else max(0, most - sum(job.workers for job in running))

    def _order(self) -> tuple[list[QueuedJob], list[QueuedJob]]:
        """Return the waiting jobs in the order in which they start, and the running ones."""
        with self._lock:
            jobs = {
                job_id: QueuedJob(job_id, self._owners[job_id], job.spec.cluster.workers, job.spec.priority)
                for job_id, job in self._jobs.items()
            }
            waiting = [jobs.pop(job.job_id) for job in self._queue if job.job_id in jobs]
            running = [one for job_id, one in jobs.items() if self._jobs[job_id].thread.is_alive()]
        return fair_order(waiting, running), running

    def measures(self) -> dict[str, JobMeasures]:
        """Return the numbers of each job that trains now."""
        with self._lock:
            jobs = list(self._jobs.values())
        found = {job.job_id: job.measures() for job in jobs}
        return {job_id: measures for job_id, measures in found.items() if measures is not None}

    def artifacts_in_use(self) -> set[str]:
        """Return the artifacts that must stay on disk: those of jobs that have not ended, and results of ended jobs."""
        with self._lock:
            jobs = dict(self._jobs)
        used: set[str] = set()
        for record in self._server.store.jobs():
            if record.job_id in jobs and not is_terminal(record.state):
                used |= jobs[record.job_id].core.fetchable
            used |= record.states
        return used

    # ---- the dispatcher

    def _dispatch(self) -> None:
        while not self._stopping:
            began = time.monotonic()
            try:
                self._server.pool.remove_silent()
                if self._serve_one():
                    continue
            except Exception:  # other jobs continue
                _log.exception("the scheduler goes on")
            time.sleep(REST * (time.monotonic() - began))  # thousands of slots may register one after the other
            self._server.pool.wait(DISPATCH_POLL_S)

    def _serve_one(self) -> bool:
        """Start or end the first job of the queue for which that is possible; return whether there was one.

        A job that waits for busy slots, or for processes that are being started, is not passed by later ones.
        """
        self._drop_ended()
        order, running = self._order()
        if not order:
            self._server.pool.demand = 0
        may_start = True
        for queued in order:
            job = self._jobs[queued.job_id]
            quota = self._server.quotas.get(queued.owner, Quota())
            admitted = quota.admits(queued, running)
            if not admitted and job.job_id not in self._told:
                self._told.add(job.job_id)
                job.job_log.write("info", f"The job waits for other jobs of {queued.owner} to end. {quota}.")
            if self._start_or_end(job, may_start=may_start and admitted):
                with self._lock:
                    self._queue.remove(job)
                self._waiting.pop(job.job_id, None)
                self._told.discard(job.job_id)
                return True
            if admitted:
                may_start = may_start and self._waiting[job.job_id].may_be_passed
        return False

    def _drop_ended(self) -> None:
        """Drop the jobs that have ended; a job whose end could not be stored remains until it is."""
        with self._lock:
            queued = set(map(id, self._queue))
            ended = [r for r in self._jobs.values() if id(r) not in queued and not r.thread.is_alive()]
        for job in ended:
            try:
                job.job_log.flush()
                self._run_again(job)
                with self._lock:
                    if self._jobs[job.job_id] is job:
                        del self._jobs[job.job_id], self._owners[job.job_id]
            except NfdtError as error:
                self._warnings.warn("the end of job %s: %s", job.job_id, error)

    def _run_again(self, job: Job) -> None:
        """Queue a job again whose run was broken off, and that can go on."""
        store, artifacts = self._server.store, self._server.artifacts
        if job.broken_off and requeue(store.get(job.job_id), store, artifacts, job.broken_off):
            self.submitted(job.job_id, job.core.control)

    def _start_or_end(self, job: Job, *, may_start: bool) -> bool:
        """Start a job of the queue, or end it; return False while it must wait."""
        try:
            if (stop := job.mailbox.cause) is not None:
                raise stop
            if not may_start:
                return False
            if job.job_id not in self._waiting:
                stall = StallWatch(self._server.clock.now(), STALL_AFTER_S)
                shards = _count_shards(type(job.core.topology), job.spec, job.core.manifest)
                self._waiting[job.job_id] = _WaitingJob(job, shards, stall)
            if not self._try_acquire(self._waiting[job.job_id]):
                return False
            job.thread.start()
        except Exception as error:
            if not isinstance(error, NfdtError):
                _log.exception("job %s", job.job_id)
            try:
                job.close(outcome_of(error))
            except Exception:  # its end is stored nevertheless
                _log.exception("job %s", job.job_id)
        return True

    def _try_acquire(self, waiting: _WaitingJob) -> bool:
        """Take the initial slots of the job if enough are free or its time limit has passed; return whether it did.

        Raises:
            JobFailed: The time limit has passed and no slot is registered.
        """
        job, now = waiting.job, self._server.clock.now()
        slots, topology = job.core.slots, job.core.topology
        slots.evict_other_sessions()
        topology.start(waiting.shards)
        pool, ring, ranks = self._server.pool, slots.ring, topology.awaited_slots
        shards = SlotNeed("shard", waiting.shards, *pool.attending("shard", slots.accepts_shard, ring))
        wanted, ring = (ranks, "") if ranks else (slots.wanted, ring)
        workers = SlotNeed("worker", wanted, *pool.attending("worker", slots.accepts, ring, job.job_id))
        short = [need for need in ((workers,) if ranks else (shards, workers)) if need.attending < need.wanted]
        waiting.short_since = None if not short else waiting.short_since or now
        late = waiting.short_since is not None and now - waiting.short_since >= job.spec.start_timeout_s
        least = topology.least_workers
        if not ranks and shards.met and (workers.free >= least or (late and workers.free > 0)):
            job.acquire(waiting.shards, workers.wanted)
            pool.demand = 0
            positions = (*slots.shards, *slots.workers.values())
            taken = ", ".join(f"{one.slot.name} on {one.slot.hello.host}" for one in positions)
            _log.info("job %s starts with %s", job.job_id, taken or "slots of its own")
            if workers.free < least:
                job.job_log.write(
                    "warning",
                    f"{workers.free} of {workers.wanted} workers are there after {job.spec.start_timeout_s:g} s: "
                    "training begins with them; others may join later.",
                )
            return True
        pool.demand = 0 if ranks else max(0, least - workers.free)
        topology.give_up(short, late=late)
        lasting = waiting.short_since is not None and now - waiting.short_since >= PASSED_AFTER_S
        waiting.may_be_passed = lasting and (ranks > 0 or not topology.view.launched) and (shards in short or not late)
        if (since := waiting.stall.stalled_s(now)) is not None:
            missing = [(need.wanted - need.free, f"{need.role} slot") for need in (shards, workers) if not need.met]
            lacking = [f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in missing]
            if not workers.met:
                lacking[-1] += slots.unfit
            job.job_log.stalled(lacking, since)
        return False


def _count_shards(topology: type[Topology], spec: JobSpec, manifest: Manifest) -> int:
    """Return the number of shard slots of a job; raise if its program cannot be divided into so many shards."""
    return count_shards(manifest, spec.cluster.shards) if topology.view.pushes else 1
