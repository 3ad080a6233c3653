"""Calls the Jobs service, with deadlines and NFDT's errors; streams of events survive a broken connection."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import grpc

from nfdt.core.errors import NotStored, ProtocolError, ServerUnreachable
from nfdt.core.events import Event
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire import jobs_pb2_grpc
from nfdt.core.wire.channel import open_channel
from nfdt.core.wire.status import translate, translated
from nfdt.core.work.patience import Patience
from nfdt.model.program.state import Contents

DESCRIBE_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 60.0
SNAPSHOT_TIMEOUT_S = 600.0
TRACE_TIMEOUT_S = 300.0
RECONNECT_S = 90.0
SETTLED_S = 5.0  # a connected call that lasted this long had a server behind it
REPORT_S = 5.0  # time without an answer after which the terminal shows that the client waits
PAUSE_S = 0.2
RECORDED_S, RECORDED_BATCH = 1.0, 1000  # a live job sends fewer events than this in this time
TERMINAL = ("succeeded", "failed", "cancelled")

_T = TypeVar("_T")


class JobsClient:
    """Client of a job server.

    Args:
        address: ``HOST:PORT``.
        token: The secret sent with every call.
        ca_file: Certificate authority of a server with TLS.
        cert_file: Certificate of this client, for servers that ask for one.
        key_file: Its private key.
        insecure: Whether the token may be sent in plain text to another machine.
        check: Called before each reconnection attempt; raises when another attempt is pointless.
        reconnect_s: Time in seconds to retry while the server does not answer: it may be restarted.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        insecure: bool = False,
        check: Callable[[], None] | None = None,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.address = address
        self._check, self.reconnect_s = check, reconnect_s
        self._channel = open_channel(
            address, token, ca_file=ca_file, cert_file=cert_file, key_file=key_file, insecure=insecure
        )
        self.stub: Any = jobs_pb2_grpc.JobsStub(self._channel)

    @cached_property
    def artifact_folder(self) -> Path | None:
        """Folder of the server's artifacts, if the server is on this machine."""
        state_dir = self.describe().state_dir
        return Path(state_dir, "artifacts") if state_dir else None

    def close(self) -> None:
        """Close the channel; running calls end."""
        self._channel.close()

    def call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method of the service; its errors are NFDT's."""
        with translated(self.address):
            return getattr(self.stub, method)(request, timeout=timeout_s)

    def describe(self) -> pb.ServerDescription:
        """Return the server's description; fail at once if nothing listens at the address."""
        return self.call("Describe", pb.DescribeRequest(), DESCRIBE_TIMEOUT_S)

    def submit(self, spec_json: str, session: str, name: str = "") -> pb.SubmitReply:
        """Submit a job; with a name, find the one that has it."""
        return self.call("Submit", pb.SubmitRequest(spec_json=spec_json, session=session, name=name))

    def show(self, job_id: str) -> pb.JobDescription:
        """Return a job's description."""
        return self.call("Show", pb.JobRef(job_id=job_id))

    def trace(self, job_id: str) -> list[pb.ProcessSpans]:
        """Return the deliveries of spans of a job's processes, of each process in order."""
        with translated(self.address):
            return [*self.stub.Trace(pb.JobRef(job_id=job_id), timeout=TRACE_TIMEOUT_S)]

    def list(self) -> list[pb.JobDescription]:
        """Return all jobs of the server."""
        return list(self.call("List", pb.ListRequest()).jobs)

    def resume(self, job_id: str) -> str:
        """Submit a job that goes on from the last epoch's state of another one, and return its id."""
        return str(self.call("Resume", pb.JobRef(job_id=job_id)).job_id)

    def delete(self, job_id: str = "", *, older_than_s: float = 0.0) -> pb.DeleteReply:
        """Remove a job that has ended, or without a name all that ended so many seconds ago."""
        return self.call("Delete", pb.DeleteRequest(job_id=job_id, older_than_s=older_than_s))

    def slots(self) -> Sequence[pb.SlotDescription]:
        """Return the registered slots of the server, by machine."""
        return list(self.call("Slots", pb.SlotsRequest()).slots)

    def open_page(self, job_id: str = "") -> str:
        """Return a link that opens the server's page once, at a job or at the list of jobs; "" without a page."""
        return str(self.call("OpenPage", pb.OpenPageRequest(job_id=job_id)).url)

    def control(self, job_id: str, timeout_s: float = CALL_TIMEOUT_S, **action: Any) -> None:
        """Send one control action, as in ``control(job, proceed=pb.Proceed(epoch=1))``."""
        self.call("Control", pb.ControlRequest(job_id=job_id, **action), timeout_s)

    def snapshot(self, job_id: str, contents: Contents = "everything") -> pb.SnapshotReply:
        """Return the name and the position of a job's current state, with these contents at least."""
        request = pb.SnapshotRequest(job_id=job_id, contents=pb.SnapshotRequest.Contents.Value(contents.upper()))
        return self.call("Snapshot", request, SNAPSHOT_TIMEOUT_S)

    def watch(self, job_id: str, after: int = 0, session: str = "") -> Iterator[Event]:
        """Yield the events after a cursor until the job has ended, each once; reconnects broken streams.

        Args:
            job_id: The job.
            after: The cursor.
            session: Session of the client whose callbacks the job waits for; "" for one that only looks on.

        Raises:
            JobTaken: the client of another session is attached to the job.
            ServerUnreachable: the stream broke and no event came for ``reconnect_s`` seconds of trying.
        """
        cursor, ended, patience = after, False, self._patience(settles=True)
        while not ended:
            try:
                for event in self._stream(job_id, cursor, session):
                    cursor, ended = event.cursor, ended or is_end(event)
                    patience.success()
                    yield event
                problem = ServerUnreachable(f"{self.address} ended the events of job {job_id} early.")
                ended = ended or self.show(job_id).state in TERMINAL
            except ServerUnreachable as error:
                problem = ServerUnreachable(str(error))
            if not ended:
                patience.again(problem)

    def persist(self, action: Callable[[], _T], *, transfers: bool = False, stores: bool = False) -> _T:
        """Return the result of an action; repeat it while the server does not answer.

        Args:
            action: Calls of this server that may be repeated.
            transfers: Whether the action takes long and goes on where it broke.
            stores: Whether to repeat it also while the server's disk is full.

        Raises:
            ServerUnreachable: the server has not answered for ``reconnect_s`` seconds.
            NotStored: the server's disk is full; with ``stores``, for as long.
        """
        patience = self._patience(settles=transfers)
        passing = (ServerUnreachable, NotStored) if stores else (ServerUnreachable,)
        while True:
            try:
                return action()
            except passing as error:
                patience.again(error)

    def _patience(self, *, settles: bool) -> Patience:
        """Return the patience of calls; ``settles``: one that lasted long shows that the server was there meanwhile."""
        return Patience(
            self.reconnect_s,
            pause=lambda left_s: self.wait_ready(min(left_s, 1.0)),
            settled_s=SETTLED_S if settles else math.inf,
            report_s=REPORT_S,
        )

    def answers(self) -> bool:
        """Whether the server answers now."""
        try:
            self.describe()
        except ServerUnreachable:
            return False
        return True

    def recorded(self, job_id: str) -> Iterator[Event]:
        """Yield the events so far."""
        # The service only streams: of a live job, a short batch before the deadline marks the end of its past.
        cursor, count = 0, RECORDED_BATCH
        while count >= RECORDED_BATCH:
            count = 0
            for event in self._stream(job_id, cursor, timeout_s=RECORDED_S):
                cursor, count = event.cursor, count + 1
                yield event
                if is_end(event):
                    return

    def _stream(self, job_id: str, after: int, session: str = "", *, timeout_s: float | None = None) -> Iterator[Event]:
        call = self.stub.Watch(pb.WatchRequest(job_id=job_id, after=after, session=session), timeout=timeout_s)
        try:
            for message in call:
                if message.cursor > after:
                    after = message.cursor
                    yield _event(message)
        except grpc.RpcError as error:
            if timeout_s is not None and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            raise translate(error, self.address) from None
        finally:
            call.cancel()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait a moment for the server to answer again; return whether it is connected.

        Raises:
            NfdtError: raised by ``check`` when waiting is pointless.
        """
        if self._check is not None:
            self._check()
        with contextlib.suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
            time.sleep(min(timeout_s, PAUSE_S))
            return True
        return False


def is_end(event: Event) -> bool:
    """Whether this event is the end of its job."""
    return event.kind == "state" and event.data.get("state") in TERMINAL


def _event(message: pb.JobEvent) -> Event:
    try:
        data = json.loads(message.data_json or "{}")
    except ValueError as error:
        raise ProtocolError(f"Event {message.cursor}: expected JSON. Received: {message.data_json[:80]!r}.") from error
    kind: Any = message.kind
    return Event(message.cursor, message.at, kind, data)
