"""Calls of the Jobs service, with deadlines, NFDT's error types, and a watch that survives a broken stream."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from nfdt.core.errors import JobCancelled, NfdtError, ProtocolError, ServerUnreachable
from nfdt.core.events import Event
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire import jobs_pb2_grpc
from nfdt.core.wire.channel import open_channel
from nfdt.core.wire.status import translate, translated

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 60.0
SNAPSHOT_TIMEOUT_S = 600.0
RECONNECT_S = 30.0
SETTLED_S = 5.0  # a stream that was open this long had a server behind it
PAUSE_S = 0.2
RECORDED_S, RECORDED_BATCH = 1.0, 1000  # a live job sends fewer events than this in this time
TERMINAL = ("succeeded", "failed", "cancelled")


def _ignore() -> None:
    return None


class JobsClient:
    """Client of a job server.

    Args:
        address: ``HOST:PORT``.
        token: The secret sent with every call.
        ca_file: Certificate authority of a server with TLS.
        cert_file: Certificate of this client, for servers that ask for one.
        key_file: Its private key.
        check: Called before each reconnection attempt; raises when another attempt is pointless.
        reconnect_s: Time in seconds to retry a broken event stream while no event arrives.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        check: Callable[[], None] = _ignore,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.address = address
        self._check, self._reconnect_s = check, reconnect_s
        self._channel = open_channel(address, token, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
        self.stub: Any = jobs_pb2_grpc.JobsStub(self._channel)

    def close(self) -> None:
        """Close the channel; running calls end."""
        self._channel.close()

    def describe(self) -> pb.ServerDescription:
        """Return the server's description; fail at once if nothing listens at the address."""
        with translated(self.address):
            return self.stub.Describe(pb.DescribeRequest(), timeout=DESCRIBE_TIMEOUT_S)

    def submit(self, spec_json: str, session: str) -> str:
        """Submit a job and return its id."""
        with translated(self.address):
            request = pb.SubmitRequest(spec_json=spec_json, session=session)
            return str(self.stub.Submit(request, timeout=CALL_TIMEOUT_S).job_id)

    def show(self, job_id: str) -> pb.JobDescription:
        """Return a job's description."""
        with translated(self.address):
            return self.stub.Show(pb.JobRef(job_id=job_id), timeout=CALL_TIMEOUT_S)

    def list(self) -> list[pb.JobDescription]:
        """Return all jobs of the server."""
        with translated(self.address):
            return list(self.stub.List(pb.ListRequest(), timeout=CALL_TIMEOUT_S).jobs)

    def resume(self, job_id: str) -> str:
        """Submit a job that goes on from the last epoch's state of another one, and return its id."""
        with translated(self.address):
            return str(self.stub.Resume(pb.JobRef(job_id=job_id), timeout=CALL_TIMEOUT_S).job_id)

    def delete(self, job_id: str = "", *, older_than_s: float = 0.0) -> pb.DeleteReply:
        """Remove a job that has ended, or without a name all that ended so many seconds ago."""
        with translated(self.address):
            request = pb.DeleteRequest(job_id=job_id, older_than_s=older_than_s)
            return self.stub.Delete(request, timeout=CALL_TIMEOUT_S)

    def slots(self) -> Sequence[pb.SlotDescription]:
        """Return the registered slots of the server, by machine."""
        with translated(self.address):
            return list(self.stub.Slots(pb.SlotsRequest(), timeout=CALL_TIMEOUT_S).slots)

    def control(self, job_id: str, timeout_s: float = CALL_TIMEOUT_S, **action: Any) -> None:
        """Send one control action, as in ``control(job, proceed=pb.Proceed(epoch=1))``."""
        with translated(self.address):
            self.stub.Control(pb.ControlRequest(job_id=job_id, **action), timeout=timeout_s)

    def snapshot(self, job_id: str) -> str:
        """Return the name of the state artifact of a job that is paused at an epoch's end."""
        with translated(self.address):
            return str(self.stub.Snapshot(pb.JobRef(job_id=job_id), timeout=SNAPSHOT_TIMEOUT_S).artifact)

    def watch(self, job_id: str, after: int = 0) -> Iterator[Event]:
        """Yield the events after a cursor until the job has ended, each once; reconnects broken streams.

        Raises:
            ServerUnreachable: the stream broke and no event came for ``reconnect_s`` seconds of trying.
        """
        cursor, ended = after, False
        broken_since: float | None = None
        while not ended:
            opened = time.monotonic()
            try:
                for event in self._stream(job_id, cursor):
                    cursor, ended, broken_since = event.cursor, ended or is_end(event), None
                    yield event
                problem: NfdtError = ServerUnreachable(f"{self.address} ended the events of job {job_id} early.")
                ended = ended or self.show(job_id).state in TERMINAL
            except (ServerUnreachable, JobCancelled) as error:
                problem = error
            if not ended:
                now = time.monotonic()
                broken_since = now if broken_since is None or now - opened > SETTLED_S else broken_since
                self._pause(problem, broken_since + self._reconnect_s)

    def recorded(self, job_id: str) -> Iterator[Event]:
        """Yield the events so far. The service only streams, so a pause in the stream marks their end."""
        cursor, count = 0, RECORDED_BATCH
        while count >= RECORDED_BATCH:
            count = 0
            for event in self._stream(job_id, cursor, timeout_s=RECORDED_S):
                cursor, count = event.cursor, count + 1
                yield event
                if is_end(event):
                    return

    def _stream(self, job_id: str, after: int, timeout_s: float | None = None) -> Iterator[Event]:
        call = self.stub.Watch(pb.WatchRequest(job_id=job_id, after=after), timeout=timeout_s)
        try:
            for message in call:
                if message.cursor > after:
                    after = message.cursor
                    yield _event(message)
        except grpc.RpcError as error:
            if timeout_s is not None and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            raise translate(error, self.address) from error
        finally:
            call.cancel()

    def _pause(self, problem: NfdtError, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ServerUnreachable(f"{problem} Gave up after {self._reconnect_s:.0f} s.") from problem
        logger.info("%s Trying again.", problem)
        self.wait_ready(min(left, 1.0))

    def wait_ready(self, timeout_s: float) -> None:
        """Wait a moment for the server to answer again.

        Raises:
            NfdtError: raised by ``check`` when waiting is pointless.
        """
        self._check()
        with contextlib.suppress(grpc.FutureTimeoutError):
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
            time.sleep(min(timeout_s, PAUSE_S))


def is_end(event: Event) -> bool:
    """Whether a job has ended with this event."""
    return event.kind == "state" and event.data.get("state") in TERMINAL


def _event(message: pb.JobEvent) -> Event:
    try:
        data = json.loads(message.data_json or "{}")
    except ValueError as error:
        raise ProtocolError(f"Event {message.cursor}: expected JSON. Received: {message.data_json[:80]!r}.") from error
    kind: Any = message.kind
    return Event(message.cursor, message.at, kind, data)
