"""Job server without workers, over real gRPC: its jobs "train" by adding 1 to every weight per epoch.

An epoch that pauses between its steps adds 1 per step.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from nfdt.core.errors import JobTaken, NotStored, ProtocolError, UsageError
from nfdt.core.jobs.feed import BatchAssembly
from nfdt.core.specs.job import JobSpec, parse_job
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire import jobs_pb2_grpc
from nfdt.core.wire.channel import make_server, same_token
from nfdt.core.wire.deflated import inflated
from nfdt.core.wire.status import answering
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import dump_state, load_state
from nfdt.model.training.data import decode_batch

TOKEN = "fake-token"


@dataclass
class Job:
    """Events of one job and the requests of its client."""

    spec: JobSpec
    state: bytes
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    epoch: int = 0
    trained: int = -1  # last epoch
    steps: int = 0
    standing: int = -1
    ended: str = ""
    result: str = ""
    fed: dict[int, list[Any]] = field(default_factory=dict)
    feed_error: str = ""


class FakeJobs(jobs_pb2_grpc.JobsServicer):
    """Settings of a test: ``logs`` (epoch -> logs), ``steps``, and the faults to inject."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.artifacts: dict[str, bytes] = {}
        self.partial: dict[str, bytes] = {}
        self.jobs: dict[str, Job] = {}
        self.names: dict[str, str] = {}
        self.taken = False
        self.allow_code = True
        self.slots = 2
        self.steps = 4
        self.logs: Callable[[int], dict[str, float]] = lambda epoch: {"loss": 1.0 / (epoch + 1)}
        self.val_logs: Callable[[int], dict[str, float] | None] = lambda epoch: None
        self.failure: dict[str, Any] | None = None  # fails the job in its first epoch
        self.start_failure: dict[str, Any] | None = None  # ends the job before its first epoch
        self.break_watch_after: list[int] = []  # events of one stream, then the connection "breaks"
        self.break_upload_after: list[int] = []  # bytes
        self.full: list[str] = []  # next calls of these methods find no room on the disk
        self.break_feed = ""  # status with which the stream of credits breaks
        self.repeats_epoch_ends = False
        self.restart_within: list[int] = []  # epochs in which a restart of the server is pretended
        self.restart_after: dict[int, int] = {}  # epoch at whose end it is -> epoch with which the job goes on
        self.metrics = b""  # values of the model's metric variables, at any time
        self.progress: Callable[[int], list[int]] = lambda steps: [steps // 2, steps]
        self.watches = self.snapshots = 0
        self.received_bytes = 0

    @property
    def job(self) -> Job:
        """Return the only job."""
        (job,) = self.jobs.values()
        return job

    @answering
    def Describe(self, request: Any, context: Any) -> pb.ServerDescription:
        return pb.ServerDescription(allow_code=self.allow_code, slots=self.slots, free_slots=self.slots)

    @answering
    def FindMissing(self, request: Any, context: Any) -> pb.MissingArtifacts:
        missing = [n for n in request.sha256 if n not in self.artifacts]
        return pb.MissingArtifacts(
            missing=[pb.MissingArtifact(sha256=n, have_bytes=len(self.partial.get(n, b""))) for n in missing]
        )

    @answering
    def Upload(self, request_iterator: Iterator[pb.Chunk], context: Any) -> pb.UploadReceipt:
        self.find_room("Upload")
        first = next(request_iterator)
        name, total = first.sha256, first.total_bytes
        held = self.partial.get(name, b"")[: first.offset]
        limit = self.break_upload_after.pop(0) if self.break_upload_after else None
        for chunk in [first, *request_iterator]:
            assert chunk.offset == len(held)
            data = inflated(chunk.data, chunk.deflated, 4 * 2**20)
            held += data
            self.received_bytes += len(data)
            self.partial[name] = held
            if limit is not None and len(held) >= limit:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the cable was pulled")
        assert len(held) == total
        if hashlib.sha256(held).hexdigest() != name:
            raise ProtocolError(f"Artifact {name}: the content has another hash.")
        self.artifacts[name] = held
        return pb.UploadReceipt(sha256=name, total_bytes=total)

    @answering
    def Download(self, request: Any, context: Any) -> Iterator[pb.Chunk]:
        data = self.artifacts[request.sha256]
        for offset in range(request.offset, len(data), 1000):
            yield pb.Chunk(offset=offset, data=data[offset : offset + 1000])

    @answering
    def Submit(self, request: Any, context: Any) -> pb.SubmitReply:
        self.find_room("Submit")
        spec = parse_job(request.spec_json)
        assert set(spec.artifacts) <= set(self.artifacts)
        program = Manifest.from_bytes(self.artifacts[spec.program])
        if request.name in self.names:
            found = self.names[request.name]
            return pb.SubmitReply(job_id=found, cursor=len(self.jobs[found].events))
        job_id = f"job-{len(self.jobs)}"
        if request.name:
            self.names[request.name] = job_id
        job = self.jobs[job_id] = Job(spec, self.artifacts[program.state])
        self.emit(job, "state", {"state": "queued"})
        if self.start_failure is not None:
            self.emit(job, "state", self.start_failure)
            return pb.SubmitReply(job_id=job_id)
        self.emit(job, "state", {"state": "running"})
        job.epoch = spec.fit.initial_epoch
        job.trained = job.epoch - 1
        if not spec.attended:
            for epoch in range(spec.fit.initial_epoch, spec.fit.epochs):
                self.train(job, epoch)
        return pb.SubmitReply(job_id=job_id)

    def find_room(self, method: str) -> None:
        if method in self.full:
            self.full.remove(method)
            raise NotStored("No room.")

    def emit(self, job: Job, kind: str, data: dict[str, Any]) -> None:
        with self.changed:
            job.events.append((kind, data))
            job.ended = data["state"] if data.get("state") in ("succeeded", "failed", "cancelled") else job.ended
            self.changed.notify_all()

    def train(self, job: Job, epoch: int) -> None:
        """Train an epoch from beginning to end."""
        job.epoch = job.trained = epoch
        self.emit(job, "epoch_begin", {"epoch": epoch, "steps": self.steps})
        if self.failure is not None:
            self.emit(job, "state", self.failure)
            return
        for steps in self.progress(self.steps):
            self.emit(job, "progress", {"epoch": epoch, "steps": steps, "samples": steps, "logs": self.logs(epoch)})
            if epoch in self.restart_within:
                self.restart_within.remove(epoch)
                self.restart(job, epoch)
                return
        state = load_state(job.state)
        before = job.state
        job.state = dump_state(state.weights + 1, state.optimizer, state.untrained)
        logs, val_logs = self.logs(epoch), self.val_logs(epoch)
        for _ in range(2 if self.repeats_epoch_ends else 1):
            self.emit(job, "epoch_end", {"epoch": epoch, "logs": logs, "val_logs": val_logs, "steps": self.steps})
        if (resumed := self.restart_after.pop(epoch, None)) is not None:
            job.state = before if resumed == epoch else job.state
            self.restart(job, resumed)
        elif epoch + 1 == job.spec.fit.epochs:
            self.finish(job)

    def restart(self, job: Job, epoch: int) -> None:
        """Emit what a restarted server does, whose job goes on with this epoch."""
        job.trained = job.epoch = epoch - 1
        self.emit(job, "state", {"state": "queued", "reason": "server restarted", "epoch": epoch})
        self.emit(job, "state", {"state": "running"})

    def step(self, job: Job, epoch: int, until: int) -> None:
        """Train some steps of an epoch, and end it after the last one."""
        if job.standing != epoch:
            job.epoch, job.steps, job.standing = epoch, 0, epoch
            self.emit(job, "epoch_begin", {"epoch": epoch, "steps": self.steps})
        if job.steps == self.steps:
            self.emit(job, "epoch_end", {"epoch": epoch, "logs": self.logs(epoch), "steps": self.steps})
            if epoch + 1 == job.spec.fit.epochs:
                self.finish(job)
            return
        state, before = load_state(job.state), job.steps
        job.steps = min(until, self.steps)
        job.state = dump_state(state.weights + job.steps - before, state.optimizer, state.untrained)
        progress = {"epoch": epoch, "steps": job.steps, "logs": self.logs(epoch)}
        self.emit(job, "progress", progress)  # as it may come by itself
        self.emit(job, "progress", {**progress, "pause": job.steps < self.steps})

    def finish(self, job: Job) -> None:
        """Let the job succeed with its present state."""
        job.result = self.keep(self.with_metrics(job.state))
        self.emit(job, "result", {"artifact": job.result, "workers": {"worker-0": {"samples": 7}}})
        self.emit(job, "state", {"state": "succeeded"})

    def with_metrics(self, data: bytes) -> bytes:
        """Return a state with the metric variables."""
        state = load_state(data)
        return dump_state(state.weights, state.optimizer, state.untrained, self.metrics)

    def keep(self, data: bytes) -> str:
        """Store an artifact."""
        name = hashlib.sha256(data).hexdigest()
        self.artifacts[name] = data
        return name

    def find(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise UsageError(f"No job {job_id!r} here.")
        return self.jobs[job_id]

    @answering
    def Watch(self, request: Any, context: Any) -> Iterator[pb.JobEvent]:
        job, cursor = self.find(request.job_id), request.after
        if self.taken and request.session:
            raise JobTaken("The job is attached to another script.")
        self.watches += 1
        limit = self.break_watch_after.pop(0) if self.break_watch_after else None
        while context.is_active():
            with self.changed:
                self.changed.wait_for(lambda seen=cursor: len(job.events) > seen or job.ended, 0.1)
                fresh = job.events[cursor:]
            for kind, data in fresh:
                if limit == 0:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the cable was pulled")
                limit = None if limit is None else limit - 1
                cursor += 1
                yield pb.JobEvent(cursor=cursor, at=cursor, kind=kind, data_json=json.dumps(data))
            if job.ended and cursor == len(job.events):
                return

    @answering
    def Control(self, request: Any, context: Any) -> pb.ControlReply:
        job = self.find(request.job_id)
        action = request.WhichOneof("action")
        value = getattr(request, action)
        if action == "proceed":
            job.asked.append((action, (value.epoch, value.until) if value.until else value.epoch))
            if value.until:
                self.step(job, value.epoch, value.until)
            elif job.spec.train.kind == "arrays":
                for epoch in range(job.trained + 1, value.epoch + 1):
                    self.train(job, epoch)
            else:
                job.epoch = value.epoch
                self.emit(job, "epoch_begin", {"epoch": value.epoch, "steps": job.spec.train.batches})
        elif action == "stop_training":
            job.asked.append((action, None))
            if not job.ended:
                self.finish(job)
        elif action == "cancel":
            job.asked.append((action, value.reason))
            if not job.ended:
                self.emit(job, "state", {"state": "cancelled", "reason": value.reason})
        elif action == "validated":
            self.emit(job, "validated", {"epoch": value.epoch, "val_logs": json.loads(value.logs_json)})
        elif action == "set_learning_rate":
            job.asked.append((action, value.value))
        else:
            job.asked.append((action, load_state(self.artifacts[value.artifact])))
            job.state = self.artifacts[value.artifact]
        return pb.ControlReply()

    @answering
    def Snapshot(self, request: Any, context: Any) -> pb.SnapshotReply:
        self.snapshots += 1
        job = self.find(request.job_id)
        return pb.SnapshotReply(artifact=self.keep(self.with_metrics(job.state)), epochs=job.epoch + 1)

    @answering
    def Feed(self, request_iterator: Iterator[pb.FedBatch], context: Any) -> Iterator[pb.FeedCredit]:
        job = self.find(next(request_iterator).job_id)
        if self.break_feed:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.break_feed)
        ended: set[int] = set()

        def receive() -> None:
            assembly = BatchAssembly(lambda epoch, size: None)
            for batch in request_iterator:
                if batch.error:
                    job.feed_error = batch.error
                    self.emit(job, "state", {"state": "failed", "reason": batch.error})
                    return
                with self.changed:
                    if batch.end_of_epoch:
                        ended.add(batch.epoch)
                    elif (whole := assembly.add(batch)) is not None:
                        job.fed.setdefault(batch.epoch, []).append(decode_batch(whole.data))
                    else:
                        continue
                    self.changed.notify_all()
                progress = {"epoch": batch.epoch, "steps": len(job.fed[batch.epoch]), "logs": self.logs(batch.epoch)}
                self.emit(job, "epoch_end" if batch.end_of_epoch else "progress", progress)
                if batch.end_of_epoch:
                    if batch.epoch + 1 == job.spec.fit.epochs:
                        self.finish(job)

        threading.Thread(target=receive, daemon=True).start()
        granted: dict[int, int] = {}
        while context.is_active() and not job.ended:
            epoch = job.epoch
            with self.changed:
                room = len(job.fed.get(epoch, [])) + 2 - granted.get(epoch, 0)
                if room <= 0 or epoch in ended:
                    self.changed.wait(0.05)
                    continue
                granted[epoch] = granted.get(epoch, 0) + room
            yield pb.FeedCredit(epoch=epoch, batches=room)

    @answering
    def List(self, request: Any, context: Any) -> pb.JobList:
        return pb.JobList(jobs=[self.describe(job_id) for job_id in self.jobs])

    @answering
    def Show(self, request: Any, context: Any) -> pb.JobDescription:
        self.find(request.job_id)
        return self.describe(request.job_id)

    def describe(self, job_id: str) -> pb.JobDescription:
        job = self.jobs[job_id]
        return pb.JobDescription(
            job_id=job_id,
            name=job.spec.name,
            state=job.ended or "running",
            epochs=job.spec.fit.epochs,
            result_artifact=job.result,
            program=job.spec.program,
        )


@dataclass
class FakeServer:
    """Servicer and the address it listens on."""

    jobs: FakeJobs
    address: str
    grpc_server: grpc.Server

    def weights(self) -> np.ndarray:
        """Return the state of the only job."""
        return load_state(self.jobs.job.state).weights


def start(address: str = "127.0.0.1:0", jobs: FakeJobs | None = None) -> FakeServer:
    """Start a fake, by default on a free port."""
    jobs = jobs or FakeJobs()
    server, address = make_server(address, authenticate=lambda method, token: same_token(TOKEN, token), max_threads=32)
    jobs_pb2_grpc.add_JobsServicer_to_server(jobs, server)
    server.start()
    return FakeServer(jobs, address, server)
