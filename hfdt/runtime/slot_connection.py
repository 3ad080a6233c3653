"""Connection of rank 0 to a job server, and the files in which other ranks leave the exceptions that end them.

Rank 0 registers two slots: one as the worker and one as the shard of its ranks. Rank 0 of a group registers a worker.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format

from nfdt.core.errors import NfdtError
from nfdt.core.host.private_files import replacing
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import LOOPBACK, open_channel
from nfdt.core.work.slot_connection import SlotStream, call_next, describe_failure, make_hello

logger = logging.getLogger(__name__)

LOOK_S = 0.3


class SlotConnection:
    """Streams of rank 0's slots. A stream that the server ends terminates this process: the server is gone.

    Args:
        address: ``HOST:PORT`` of the server.
        token: Token of the server.
        ring: Name of the ring.
        roles: Roles of the slots.
        tls: ``ca_file``, ``cert_file``, ``key_file``, ``insecure`` of :func:`nfdt.core.wire.channel.open_channel`.
        host: Address of this machine at which the server reaches the rank.

    Attributes:
        address: ``HOST:PORT`` of the server.
        host: Address of this machine at which the server reaches the rank.
        insecure: Whether shards may be reached, and the state be served, in plain text: the job server is.
        stub: Stub of the Workers service.
        job_id: Current job.
        stopped: Set when this job is over.
    """

    def __init__(
        self,
        address: str,
        token: str,
        ring: str,
        roles: Sequence[str],
        *,
        tls: Mapping[str, Any] = MappingProxyType({}),
        host: str = LOOPBACK,
    ) -> None:
        self.address, self.host = address, host
        self.insecure = not tls.get("ca_file")
        self._channel = open_channel(address, token, **tls)
        self.stub: Any = workers_pb2_grpc.WorkersStub(self._channel)
        self.job_id = self._job_token = ""
        self.stopped = threading.Event()
        self._inbox: queue.SimpleQueue[pb.Assignment] = queue.SimpleQueue()
        self._streams: dict[str, SlotStream] = {}
        for role in roles:
            hello = make_hello(f"{ring}-{role}", role, address=host, ring=ring)
            stream = self._streams[role] = SlotStream(self.stub, hello, address)
            threading.Thread(target=self._listen, args=(stream,), name=f"slot-{role}", daemon=True).start()

    @classmethod
    def of_ring(cls, directory: Path, server: str, roles: Sequence[str]) -> SlotConnection:
        """Return the connection of the ring with this directory, in which the token of the server is."""
        return cls(server, (directory / "token").read_text().strip(), directory.name, roles)

    def _listen(self, stream: SlotStream) -> None:
        try:
            for assignment in stream.assignments():
                kind = assignment.WhichOneof("assignment")
                if kind == "dismiss" or (kind == "release" and assignment.release.job_id == self.job_id):
                    self.stopped.set()
                if kind == "worker":
                    self._job_token = assignment.worker.job_token
                self._inbox.put(assignment)
        except NfdtError as error:
            if stream.closed:
                return
            logger.error("the job server: %s", error)
            logging.shutdown()
            os._exit(error.exit_code)

    def begin_job(self, job_id: str) -> None:
        """Set the current job, which is not over."""
        self.job_id = job_id
        self.stopped.clear()

    def next_assignment(self, timeout_s: float) -> pb.Assignment | None:
        """Wait for the next assignment of the server; return None if none arrives in time."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def send(self, role: str, **message: Any) -> None:
        """Send a message for one of the slots."""
        self._streams[role].send(**message)

    def ask(self, request: pb.NextRequest) -> pb.NextReply:
        """Send a report and return the next instruction; the call is not repeated."""
        return call_next(self.stub, (self.job_id, self._job_token), self.address, request)

    def close(self) -> None:
        """Disconnect from the server."""
        for stream in self._streams.values():
            stream.close()
        self._channel.close()


def failure_of(job_id: str, error: BaseException, rank: int) -> pb.SlotFailed:
    """Return the message from which the client raises a rank's exception again."""
    return describe_failure(job_id, error, failed_in=f"rank-{rank}", unquotes_keys=False)


def failure_file(directory: Path, rank: int) -> Path:
    """Return the path of the file with the exception of a rank."""
    return directory / f"failure-{rank}.json"


def leave_failure(directory: Path, rank: int, error: BaseException) -> None:
    """Write the exception of this rank to its file, atomically."""
    message = failure_of("", error, rank)
    value = json_format.MessageToDict(message, preserving_proto_field_name=True)
    try:
        with replacing(failure_file(directory, rank)) as file:
            file.write(json.dumps(value).encode())
    except OSError as problem:
        logger.warning("rank %d could not write down why it failed: %s", rank, problem)


def report_failure(directory: Path, connection: SlotConnection | None, rank: int, error: BaseException) -> None:
    """Report the exception of this rank in its file and, during a job, over its own connection to the server if any."""
    leave_failure(directory, rank, error)
    if connection is not None and connection.job_id and not connection.stopped.is_set():
        connection.send("worker", failed=failure_of(connection.job_id, error, rank))


def watch_failures(directory: Path, connection: SlotConnection) -> threading.Event:
    """Start a thread that reports the first failure of a rank to the server; the leader calls it.

    Args:
        directory: Directory of the ring.
        connection: Registration at the server.

    Returns:
        An event that is set when a failure has been reported.
    """
    reported = threading.Event()

    def look() -> None:
        while not reported.wait(LOOK_S):
            try:
                if connection.job_id and (failed := _first_failure(directory)) is not None:
                    failed.job_id = connection.job_id
                    connection.send("worker", failed=failed)
                    reported.set()
            except (OSError, ValueError, json_format.ParseError) as error:  # of one file, at one moment: retry
                logger.warning("what a rank left behind could not be read: %s", error)

    threading.Thread(target=look, name="failures", daemon=True).start()
    return reported


def _first_failure(directory: Path) -> pb.SlotFailed | None:
    """Return the exception of the rank that failed first; None if no rank has failed."""
    files = sorted(directory.glob("failure-*.json"), key=lambda path: path.stat().st_mtime)
    return json_format.ParseDict(json.loads(files[0].read_text()), pb.SlotFailed()) if files else None
