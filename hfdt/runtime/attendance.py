"""Rank 0's place at a job server: two slots, one that is the ring's worker and one that is its shard.

Rank 0 of a group has the first one only.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from nfdt.core.errors import NfdtError
from nfdt.core.host.machine import boot_id, versions
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import open_channel
from nfdt.core.wire.status import translated

logger = logging.getLogger(__name__)

NEXT_TIMEOUT_S = 60.0
ROLES = ("shard", "worker")


class Attendance:
    """Both streams. A stream that ends by itself means that the server is gone, and so is this process.

    Attributes:
        stub: Of the Workers service.
        job_id: The job that is worked for.
        stopped: Set when that job is over.
    """

    def __init__(self, address: str, token: str, ring: str, roles: Sequence[str] = ROLES) -> None:
        self.address, self._ring = address, ring
        self._channel = open_channel(address, token)
        self.stub: Any = workers_pb2_grpc.WorkersStub(self._channel)
        self.job_id = self._job_token = ""
        self._closing = False
        self.stopped = threading.Event()
        self._inbox: queue.SimpleQueue[pb.Assignment] = queue.SimpleQueue()
        self._outboxes: dict[str, queue.SimpleQueue[pb.SlotMessage | None]] = {}
        for role in roles:
            outbox = self._outboxes[role] = queue.SimpleQueue()
            outbox.put(pb.SlotMessage(hello=self._hello(role)))
            threading.Thread(target=self._listen, args=(outbox,), name=f"attend-{role}", daemon=True).start()

    def _hello(self, role: str) -> pb.SlotHello:
        return pb.SlotHello(
            name=f"{self._ring}-{role}",
            host=socket.gethostname(),
            pid=os.getpid(),
            role=role,
            versions=versions(),
            device="gpu:0" if os.environ.get("CUDA_VISIBLE_DEVICES", "-1") not in ("", "-1") else "cpu",
            boot_id=boot_id(),
            ring=self._ring,
        )

    def _listen(self, outbox: queue.SimpleQueue[pb.SlotMessage | None]) -> None:
        try:
            with translated(self.address):
                for assignment in self.stub.Attend(iter(outbox.get, None), wait_for_ready=False):
                    kind = assignment.WhichOneof("assignment")
                    if kind == "dismiss" or (kind == "release" and assignment.release.job_id == self.job_id):
                        self.stopped.set()
                    if kind == "worker":
                        self._job_token = assignment.worker.job_token
                    self._inbox.put(assignment)
        except NfdtError as error:
            if self._closing:
                return
            logger.error("the job server: %s", error)
            logging.shutdown()
            os._exit(error.exit_code)

    def begin(self, job_id: str) -> None:
        """Work for this job from now on."""
        self.job_id = job_id
        self.stopped.clear()

    def next_assignment(self, timeout_s: float) -> pb.Assignment | None:
        """The next message of the server, waited for; None when none comes in time."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def say(self, role: str, **message: Any) -> None:
        """A message of one of the slots."""
        self._outboxes[role].put(pb.SlotMessage(**message))

    def ask(self, request: pb.NextRequest) -> pb.NextReply:
        """Report and ask for work."""
        request.job_token = self._job_token
        with translated(self.address):
            return self.stub.Next(request, timeout=NEXT_TIMEOUT_S)

    def close(self) -> None:
        """Leave the server."""
        self._closing = True
        for outbox in self._outboxes.values():
            outbox.put(None)
        self._channel.close()


def failure_of(job_id: str, error: BaseException, rank: int) -> pb.SlotFailed:
    """What a client needs to raise a rank's exception again."""
    return pb.SlotFailed(
        job_id=job_id,
        exception_module=type(error).__module__,
        exception_type=type(error).__qualname__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        failed_in=f"rank-{rank}",
    )
