"""Which job gets which slots, and when: first come, first served."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import deque
from dataclasses import dataclass

from nfdt.coordinator.effect_queue import STALL_AFTER_S
from nfdt.coordinator.progress import StallWatch
from nfdt.coordinator.topology_view import is_grouped, is_ring, refuse_reach, slots_of
from nfdt.core.errors import JobFailed, NfdtError, UsageError
from nfdt.core.jobs.admission import check_versions
from nfdt.core.jobs.feed import FeedQueue
from nfdt.core.jobs.lifecycle import is_terminal
from nfdt.core.jobs.runner import Census
from nfdt.core.program.manifest import Manifest
from nfdt.core.sharding import count_shards
from nfdt.core.specs.job import JobSpec, check_groups, parse_job
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire.parsing import Seldom
from nfdt.jobserver.capacity import check_capacity
from nfdt.jobserver.context import Site
from nfdt.jobserver.job import JobRun
from nfdt.jobserver.need import Need
from nfdt.jobserver.outcome import outcome_of
from nfdt.launch.horovod_command import RingShape, shown

_log = logging.getLogger(__name__)

LOOK_S = 0.5
END_S = 10.0


@dataclass
class _Waiting:
    """The first job of the queue: since when it has been there, and since when there are too few slots."""

    run: JobRun
    shards: int
    stall: StallWatch
    short_since: float | None = None


class Scheduler:
    """Runs submitted jobs; a :class:`~nfdt.core.jobs.runner.JobRunner`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._runs: dict[str, JobRun] = {}
        self._queue: deque[JobRun] = deque()
        self._head: _Waiting | None = None
        self._stopping = False
        self._warnings = Seldom(_log)
        self._thread = threading.Thread(target=self._dispatch, name="scheduler", daemon=True)

    def start(self) -> None:
        """Settle what an earlier server left behind, and begin."""
        for job_id in self._site.store.recover():
            self.submitted(job_id)
        self._thread.start()

    def stop(self) -> None:
        """Let go of all jobs: their end is not told, the next server settles them."""
        with self._lock:
            self._stopping = True
            runs = list(self._runs.values())
        for run in runs:
            run.abandon()
        self._site.pool.wake()
        self._thread.join(END_S)
        for run in runs:
            if run.thread.is_alive():
                run.thread.join(END_S)

    # ---- the Jobs service

    def admit(self, spec: JobSpec, manifest: Manifest) -> None:
        """Refuse a program that no shards could hold, and a job that this server can never run."""
        try:
            layout = manifest.layout
            if is_ring(spec) or is_grouped(spec):
                self._admit_ring(spec)
            if not is_ring(spec):
                count_shards(manifest, spec.cluster.shards)
            check_groups(spec.algorithm, spec.cluster)
            state_bytes = self._site.artifacts.path(manifest.state).stat().st_size
            check_capacity(spec, weights_bytes=4 * layout.size, state_bytes=state_bytes, here=self._site.capacity())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, NfdtError):
                raise
            raise UsageError(f"Program {spec.program}: its manifest is malformed ({error!r}).") from None

    def _admit_ring(self, spec: JobSpec) -> None:
        rings, cluster = self._site.rings, spec.cluster
        if rings is None:
            raise UsageError("This server starts no Horovod rings: it was started without slots of its own.")
        if importlib.util.find_spec("horovod") is None:
            raise UsageError(
                f"algorithm={spec.algorithm.name!r}: expected Horovod on the server's machine. Received: none. "
                "Run scripts/install-horovod there."
            )
        shape = RingShape.of(cluster)
        if not self._site.takes_hosts:
            refuse_reach(shape)
        rings.check(shape)

    def submitted(self, job_id: str) -> None:
        """Queue a job."""
        record = self._site.store.get(job_id)
        try:
            run = JobRun(self._site, job_id, parse_job(record.spec_json), record.session)
        except NfdtError as error:  # an artifact is gone since the last server
            outcome = outcome_of(error)
            self._site.store.transition(job_id, "failed", reason=outcome.reason, error=outcome.error)
            return
        with self._lock:
            self._runs[job_id] = run
            self._queue.append(run)
        self._site.pool.wake()

    def run_of(self, job_id: str) -> JobRun | None:
        """The run of a job that has not ended."""
        with self._lock:
            return self._runs.get(job_id)

    def control(self, request: pb.ControlRequest) -> None:
        """Pass an action on."""
        run = self.run_of(request.job_id)
        if run is not None:
            run.control(request)
            self._site.pool.wake()
        elif not is_terminal(self._site.store.get(request.job_id).state):
            raise UsageError(f"Job {request.job_id} does not run on this server.")

    def snapshot(self, job_id: str) -> str:
        """The artifact of the job's state."""
        state = self._site.store.get(job_id).state
        run = self.run_of(job_id)
        if run is not None and not is_terminal(state):
            try:
                return run.snapshot()
            except UsageError:
                record = self._site.store.get(job_id)  # it may have ended meanwhile
                if not record.result_artifact and not is_terminal(record.state):
                    raise
        record = self._site.store.get(job_id)
        if found := record.result_artifact or record.checkpoint_artifact:
            return found
        raise UsageError(f"Job {job_id} is {record.state} and left no state.")

    def feed(self, job_id: str) -> FeedQueue:
        """Where the client's batches go."""
        run = self.run_of(job_id)
        if run is None or run.spec.train.kind != "stream":
            raise UsageError(f"Job {job_id} takes no batches: it has ended, or its data are arrays.")
        return run.feed

    def watching(self, job_id: str, change: int) -> None:
        """One client more or less."""
        run = self.run_of(job_id)
        if run is not None:
            run.watching(change)

    def census(self) -> Census:
        """The worker slots that attend."""
        return self._site.pool.census()

    def artifacts_in_use(self) -> set[str]:
        """Names that must stay on disk: of jobs that have not ended, and what ended jobs produced."""
        used: set[str] = set()
        with self._lock:
            for run in self._runs.values():
                used |= run.artifacts
        for record in self._site.store.jobs():
            used |= {name for name in (record.result_artifact, record.checkpoint_artifact) if name}
        return used

    # ---- the dispatcher

    def _dispatch(self) -> None:
        while not self._stopping:
            try:
                if self._turn():
                    continue
            except Exception:  # whatever it is, there are other jobs
                _log.exception("the scheduler goes on")
            self._site.pool.wait(LOOK_S)

    def _turn(self) -> bool:
        """Whether the first job of the queue could be started or ended."""
        self._forget_ended()
        with self._lock:
            first = self._queue[0] if self._queue else None
        if first is None or not self._settle(first):
            return False
        with self._lock:
            self._queue.remove(first)
        return True

    def _forget_ended(self) -> None:
        """Drop the runs that have ended; one whose end could not be stored stays until it is."""
        with self._lock:
            queued = set(map(id, self._queue))
            ended = [r for r in self._runs.values() if id(r) not in queued and not r.thread.is_alive()]
        for run in ended:
            try:
                if run.journal.settled():
                    with self._lock:
                        del self._runs[run.job_id]
            except NfdtError as error:
                self._warnings.warn("the end of job %s: %s", run.job_id, error)

    def _settle(self, run: JobRun) -> bool:
        """Start the first job of the queue, or end it; False while it has to wait."""
        try:
            if (stop := run.stopped_by()) is not None:
                raise stop
            if self._head is None or self._head.run is not run:
                stall = StallWatch(self._site.clock.now(), STALL_AFTER_S)
                shards = 1 if is_ring(run.spec) else count_shards(run.manifest, run.spec.cluster.shards)
                self._head = _Waiting(run, shards, stall)
            if not self._ready(self._head):
                return False
            run.thread.start()
        except Exception as error:
            if not isinstance(error, NfdtError):
                _log.exception("job %s", run.job_id)
            try:
                run.close(outcome_of(error))
            except Exception:  # it has told how it ended all the same
                _log.exception("job %s", run.job_id)
        return True

    def _ready(self, waiting: _Waiting) -> bool:
        """Take the slots the job begins with, when enough are there or time is up.

        Raises:
            JobFailed: time is up and there is nobody.
        """
        run, now = waiting.run, self._site.clock.now()
        run.crew.dismiss_strangers()
        self._launch(waiting)
        pool, ring = self._site.pool, run.crew.ring
        shards = Need("shard", waiting.shards, *pool.attending("shard", ring=ring))
        workers = Need("worker", slots_of(run.spec), *pool.attending("worker", run.crew.accepts, ring))
        short = [need for need in (shards, workers) if need.attending < need.wanted]
        waiting.short_since = None if not short else waiting.short_since or now
        late = waiting.short_since is not None and now - waiting.short_since >= run.spec.start_timeout_s
        if shards.met and (workers.met or (late and workers.free > 0)):
            run.recruit(waiting.shards, workers.wanted)
            if not workers.met:
                run.journal.tell(
                    "warning",
                    f"{workers.free} of {workers.wanted} workers are there after {run.spec.start_timeout_s:g} s: "
                    "training begins with them; others may join later.",
                )
            return True
        self._give_up(run, short, late)
        if (since := waiting.stall.stalled_s(now)) is not None:
            lacking = [f"{need.wanted - need.free} {need.role} slots" for need in (shards, workers) if not need.met]
            run.journal.stalled(lacking, since)
        return False

    def _launch(self, waiting: _Waiting) -> None:
        if is_ring(waiting.run.spec):
            waiting.run.claim_ring()
            return
        if waiting.run.groups is not None:
            waiting.run.groups.start()
        launcher = self._site.launcher
        if launcher is None:
            return
        attending, free = self._site.pool.attending("shard")
        launcher.ensure("shard", max(0, attending - free) + waiting.shards)
        if self._site.launches_workers and waiting.run.groups is None:
            wanted, most = waiting.run.spec.cluster.workers, self._site.most_workers
            launcher.ensure("worker", wanted if most is None else min(wanted, most))

    def _give_up(self, run: JobRun, short: list[Need], late: bool) -> None:
        if run.ring is not None:
            if late:
                raise JobFailed(
                    f"The ranks did not come up within {run.spec.start_timeout_s:g} s; see {run.ring.log}. "
                    f"They were started with: {shown(run.ring.command)}"
                )
            return
        launcher = self._site.launcher
        for need in short:
            launched = need.role == "shard" or self._site.launches_workers
            if launcher is not None and launched and launcher.failure:
                raise JobFailed(f"No {need.role} slots: {launcher.failure}")
            if late and need.attending == 0:
                if need.role == "worker":
                    check_versions(run.spec, self._site.pool.census().versions)
                raise JobFailed(
                    f"No {need.role} slot attends this server after {run.spec.start_timeout_s:g} s; "
                    f"the job wants {need.wanted}. Add some with `nfdt worker --server HOST:PORT --slots N`."
                )
