"""The Jobs service, for scripts and the command line: it decodes requests, calls other parts, and encodes answers."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import nfdt
from nfdt.core.errors import AuthenticationFailed, NfdtError, ProtocolError, UsageError
from nfdt.core.events import Event
from nfdt.core.jobs import admission
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.feed import BatchAssembly, BatchFeed
from nfdt.core.jobs.job_record import JobRecord, is_terminal
from nfdt.core.jobs.rights import AuditLog, Holder, Holders
from nfdt.core.jobs.runner import JobRunner, QueuePlace
from nfdt.core.jobs.store import JobStore, unknown_job
from nfdt.core.jobs.submissions import Submissions, SubmittingClient
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire import jobs_pb2_grpc
from nfdt.core.wire.channel import token_of
from nfdt.core.wire.deflated import inflated
from nfdt.core.wire.status import answering
from nfdt.core.work.artifacts import artifact_names

_log = logging.getLogger(__name__)

POLL_S = 5.0
MAX_NAMES = 10_000
MAX_CHUNK_BYTES = 4 * 2**20
MAX_SPEC_BYTES = 4 * 2**20
OTHER_OWNER = "(another owner's)"


class Page(Protocol):
    """The page of the server, for browsers.

    Attributes:
        url: Its address, without a key.
    """

    url: str

    def make_link(self, holder: Holder, job_id: str = "") -> str:
        """Return a link that opens the page once, at a job or at the list of jobs, with the rights of the holder."""


@dataclass(eq=False)
class JobsService(jobs_pb2_grpc.JobsServicer):
    """Handles requests of users' scripts and of the command line.

    Attributes:
        store: Jobs and events.
        artifacts: Uploaded and produced files.
        runner: Runs the jobs.
        holders: Holders of the tokens that the server accepts.
        audit: Log of the users' actions.
        versions: Versions of Python, Keras and TensorFlow on this server's machine.
        allow_code: Whether jobs may carry pickled code.
        limits: Limits of one client.
        shared_dir: Directory that clients of this machine read artifacts from; "" for remote ones.
        page: The server's page; None: it has none.
    """

    store: JobStore
    artifacts: ArtifactStore
    runner: JobRunner
    holders: Holders
    audit: AuditLog
    versions: Mapping[str, str]
    allow_code: bool
    limits: admission.Limits
    shared_dir: str = ""
    page: Page | None = None

    def __post_init__(self) -> None:
        self._submissions = Submissions(
            self.store, self.artifacts, self.runner, self.audit, self.allow_code, self.limits
        )

    def _holder(self, context: Any) -> Holder:
        """Return the holder of the token that came with a call."""
        holder = self.holders.find(token_of(context.invocation_metadata()))
        if holder is None:
            raise AuthenticationFailed("The server does not accept this token.")
        return holder

    def _record(self, job_id: str, context: Any) -> JobRecord:
        """Return a job that the caller may see.

        Raises:
            UsageError: There is no such job, or it belongs to another owner.
        """
        record = self.store.get(job_id)
        if not self._holder(context).sees(record.owner):
            raise unknown_job(job_id)  # as for a job that does not exist: its identifier is not confirmed either
        return record

    def _write_audit(self, action: str, job_id: str, context: Any, **details: str) -> None:
        self.audit.write(action, self._holder(context), context.peer(), job_id, **details)

    @answering
    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.ServerDescription:
        """Return versions, policy and slots."""
        slot_counts = self.runner.slot_counts()
        return pb.ServerDescription(
            nfdt_version=nfdt.__version__,
            versions=self.versions,
            allow_code=self.allow_code,
            slots=slot_counts.attending,
            free_slots=slot_counts.free,
            state_dir=self.shared_dir,
            page=self.page.url if self.page is not None else "",
        )

    @answering
    def FindMissing(self, request: pb.ArtifactNames, context: Any) -> pb.MissingArtifacts:
        """Return the artifacts that are not complete here."""
        if len(request.sha256) > MAX_NAMES:
            raise UsageError(f"Artifact names: expected at most {MAX_NAMES}. Received: {len(request.sha256)}.")
        owner = self._holder(context).owner
        missing = [name for name in request.sha256 if not self.artifacts.renew(name)]
        return pb.MissingArtifacts(
            missing=[pb.MissingArtifact(sha256=n, have_bytes=self.artifacts.have_bytes(n, owner)) for n in missing]
        )

    @answering
    def Upload(self, request_iterator: Iterator[pb.Chunk], context: Any) -> pb.UploadReceipt:
        """Receive one artifact."""
        first = next(request_iterator, None)
        if first is None:
            raise ProtocolError("Upload: expected at least one chunk. Received: none.")

        def chunks() -> Iterator[tuple[int, bytes]]:
            for chunk in itertools.chain([first], request_iterator):
                if len(chunk.data) > MAX_CHUNK_BYTES:
                    raise ProtocolError(
                        f"Chunk: expected at most {MAX_CHUNK_BYTES} bytes. Received: {len(chunk.data)}."
                    )
                yield chunk.offset, inflated(chunk.data, chunk.deflated, MAX_CHUNK_BYTES)

        holder = self._holder(context)
        self.artifacts.expire(self._needed)
        place, limited = (first.sha256, first.total_bytes, first.offset), holder.role != "admin"
        total = self.artifacts.receive(*place, chunks(), holder.owner, limited=limited)
        return pb.UploadReceipt(sha256=first.sha256, total_bytes=total)

    @answering
    def Download(self, request: pb.DownloadRequest, context: Any) -> Iterator[pb.Chunk]:
        """Send one artifact."""
        for offset, total, data in self.artifacts.chunks(request.sha256, request.offset):
            yield pb.Chunk(sha256=request.sha256, total_bytes=total, offset=offset, data=data)

    @answering
    def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        """Check a job and queue it, or find the one of its name."""
        if len(request.spec_json) > MAX_SPEC_BYTES:
            raise UsageError(f"Job specification: expected at most {MAX_SPEC_BYTES} bytes.")
        by = SubmittingClient(self._holder(context), context.peer(), request.session)
        spec = parse_job(request.spec_json)
        reply = self._submissions.submit(spec, by, request.name)
        self.artifacts.claim(artifact_names(spec))
        return reply

    @answering
    def Resume(self, request: pb.JobRef, context: Any) -> pb.SubmitReply:
        """Queue a job that continues another one from its last stored state."""
        record = self._record(request.job_id, context)
        return self._submissions.resume(record, SubmittingClient(self._holder(context), context.peer()))

    @answering
    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.JobEvent]:
        """Send the events after a cursor, until the job has ended."""
        self._record(request.job_id, context)
        session = request.session if self._holder(context).role != "read" else ""
        self.runner.watching(request.job_id, 1, session)
        try:
            context.add_callback(self.store.wake)
            for event in self._events(request.job_id, request.after, context):
                yield pb.JobEvent(cursor=event.cursor, at=event.at, kind=event.kind, data_json=json.dumps(event.data))
        finally:
            self.runner.watching(request.job_id, -1, session)

    def _events(self, job_id: str, cursor: int, context: Any) -> Iterator[Event]:
        while context.is_active():
            ended = is_terminal(self.store.get(job_id).state)
            events = self.store.events(job_id, cursor) if ended else self.store.wait(job_id, cursor, POLL_S)
            yield from events
            cursor = events[-1].cursor if events else cursor
            if ended and not events:
                return

    @answering
    def Control(self, request: pb.ControlRequest, context: Any) -> pb.ControlReply:
        """Forward an action to the job."""
        action = request.WhichOneof("action")
        if action is None:
            raise UsageError("Control: expected an action. Received: none.")
        self._record(request.job_id, context)
        if action == "set_weights":
            self.artifacts.path(request.set_weights.artifact)
            self.artifacts.claim([request.set_weights.artifact])
        if action == "cancel":
            self._write_audit("cancel", request.job_id, context)
        self.runner.control(request)
        return pb.ControlReply()

    @answering
    def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotReply:
        """Return the job's state as an artifact."""
        self._record(request.job_id, context)
        return self.runner.snapshot(request.job_id, request.contents)

    @answering
    def Feed(self, request_iterator: Iterator[pb.FedBatch], context: Any) -> Iterator[pb.FeedCredit]:
        """Receive batches; send credits until the job has ended or the client leaves."""
        first = next(request_iterator, None)
        if first is None:
            return
        self._record(first.job_id, context)
        feed = self.runner.feed(first.job_id)
        client = feed.open()
        failures: list[Exception] = []
        reader = threading.Thread(
            target=_receive, args=(feed, client, request_iterator, failures), name="feed", daemon=True
        )
        reader.start()
        while context.is_active() and not feed.closed:
            if failures:
                raise failures[0]
            if granted := feed.grant(0.5):
                yield granted

    @answering
    def List(self, request: pb.ListRequest, context: Any) -> pb.JobList:
        """Return the jobs that the caller may know of, oldest first."""
        places, holder = self.runner.places(), self._holder(context)
        return pb.JobList(jobs=[describe(one, places) for one in self.store.jobs() if holder.sees(one.owner)])

    @answering
    def Show(self, request: pb.JobRef, context: Any) -> pb.JobDescription:
        """Return the description of one job."""
        return describe(self._record(request.job_id, context), self.runner.places())

    @answering
    def Trace(self, request: pb.JobRef, context: Any) -> Iterator[pb.ProcessSpans]:
        """Send what the processes of a job did."""
        yield from self.store.spans(self._record(request.job_id, context).job_id)

    @answering
    def Slots(self, request: pb.SlotsRequest, context: Any) -> pb.SlotList:
        """Return the registered slots, with the jobs that the caller may know of."""
        return pb.SlotList(slots=seen_slots(self.store, self.runner, self._holder(context)))

    @answering
    def OpenPage(self, request: pb.OpenPageRequest, context: Any) -> pb.PageLink:
        """Return a link that opens the server's page once."""
        if request.job_id:
            self._record(request.job_id, context)
        holder = self._holder(context)
        return pb.PageLink(url=self.page.make_link(holder, request.job_id) if self.page is not None else "")

    def _needed(self) -> set[str]:
        """Return the artifacts of all jobs, those that have ended included."""
        return self.runner.artifacts_in_use().union(*map(artifacts_of, self.store.jobs()))

    @answering
    def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteReply:
        """Remove one job that has ended, or all that ended long ago, and the artifacts that no other job needs."""
        if request.job_id:
            records = [self._record(request.job_id, context)]
        else:
            holder = self._holder(context)
            records = [one for one in self.store.ended_before(request.older_than_s) if holder.sees(one.owner)]
        for record in records:
            self.store.delete(record.job_id)
        # Jobs share artifacts, for instance the data of two runs of a script.
        unneeded = set[str]().union(*map(artifacts_of, records)) - self._needed()
        freed = sum(self.artifacts.delete(name) for name in unneeded)
        for record in records:
            _log.info("job %s is deleted", record.job_id)
            self._write_audit("delete", record.job_id, context)
        return pb.DeleteReply(job_ids=[record.job_id for record in records], bytes=freed)


def _receive(feed: BatchFeed, client: int, messages: Iterator[pb.FedBatch], failures: list[Exception]) -> None:
    assembly = BatchAssembly(partial(feed.await_room, client))
    try:
        for message in messages:
            if message.error or message.end_of_epoch:
                feed.end(message.epoch, message.error or None)
            elif (batch := assembly.add(message)) is not None:
                feed.offer(client, batch)
    except NfdtError as error:
        failures.append(error)
    except Exception as error:  # the stream broke: the job's run decides whether the job can continue
        _log.info("the feed of a job ended: %s", type(error).__name__)


def seen_slots(store: JobStore, runner: JobRunner, holder: Holder) -> list[pb.SlotDescription]:
    """Return the registered slots, with the jobs that the holder of a token may know of."""
    known, found = {record.job_id for record in store.jobs() if holder.sees(record.owner)}, runner.slots()
    for slot in found:
        if slot.job_id and slot.job_id not in known:
            slot.job_id, slot.process = OTHER_OWNER, ""
    return found


def artifacts_of(record: JobRecord) -> set[str]:
    """Return the artifacts that belong to a job: what it was submitted with, and the states that it left."""
    return artifact_names(parse_job(record.spec_json)) | record.states


def describe(record: JobRecord, places: Mapping[str, QueuePlace]) -> pb.JobDescription:
    """Return the message for a job's row; ``places`` holds the places of waiting jobs in the queue."""
    spec, fields, place = parse_job(record.spec_json), vars(record), places.get(record.job_id, QueuePlace())
    same = {name: fields[name] for name in pb.JobDescription.DESCRIPTOR.fields_by_name if name in fields}
    others = {
        "name": spec.name,
        "algorithm": spec.algorithm.name,
        "workers": spec.cluster.workers,
        "epochs": spec.fit.epochs,
        "program": spec.program,
        "user": spec.user,
        "script": spec.script,
        "place": place.number,
        "starts_in_s": place.starts_in_s,
        "given_name": record.name,
        "resumable_from": (record.checkpoint_epochs or 0) if record.state in ("failed", "cancelled") else 0,
    }
    return pb.JobDescription(**same | others)
