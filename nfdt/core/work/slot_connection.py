"""A slot's side of its server: a stream that is taken up again when it breaks, calls that are made again.

A server that does not answer may be stopped, overloaded or cut off: it is looked for as long as the slot is patient.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from nfdt.core.errors import JobCancelled, NfdtError, ServerUnreachable
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.status import translated
from nfdt.core.work.numbered import NumberedOutbox

logger = logging.getLogger(__name__)

PATIENCE_S = 90.0
PAUSE_S = 0.5
NEXT_TIMEOUT_S = 60.0
LEAST_S = 15.0  # for one call: a server that is well may take ten seconds to answer


class Patience:
    """How long to go on after failures in a row.

    Args:
        limit_s: Time limit, from the first of them on.
        stopped: Set when there is nothing to wait for any more.
    """

    def __init__(self, limit_s: float, stopped: threading.Event) -> None:
        self._limit_s, self._stopped = limit_s, stopped
        self._until: float | None = None

    @property
    def left_s(self) -> float:
        """Time that is left; all of it without a failure."""
        return self._limit_s if self._until is None else self._until - time.monotonic()

    def success(self) -> None:
        """The other side has answered."""
        self._until = None

    def failure(self, since: float | None = None) -> bool:
        """No answer, asked for at ``since`` (now): whether to try again, after a pause."""
        if self._until is None:
            self._until = (since or time.monotonic()) + self._limit_s
        left_s = self.left_s
        return left_s > 0 and not self._stopped.wait(min(PAUSE_S, left_s))


class AttendStream:
    """What a slot says and is told, over as many streams as it takes.

    Args:
        stub: Of the Workers service.
        hello: Who attends; with a key.
        address: Of the server, for messages.
    """

    def __init__(self, stub: Any, hello: pb.SlotHello, address: str) -> None:
        self._stub, self._hello, self._address = stub, hello, address
        self._outbox: NumberedOutbox[pb.SlotMessage] = NumberedOutbox()
        self._received = 0
        self._attended = False
        self._closed = threading.Event()

    def say(self, **message: Any) -> None:
        """A message to the server."""
        self._outbox.put(pb.SlotMessage(received=self._received, **message))

    @property
    def closed(self) -> bool:
        """Whether this side has left."""
        return self._closed.is_set()

    def close(self) -> None:
        """Leave in order."""
        self._closed.set()
        self.say(leaving=pb.SlotLeaving())
        self._outbox.end()

    def assignments(self) -> Iterator[pb.Assignment]:
        """What the server wants, each once, until it ends the stream; a release when it has forgotten this slot.

        Raises:
            NfdtError: the server refuses this slot, or did not answer for as long as the slot is patient.
        """
        patience = Patience(self._hello.patience_s, self._closed)
        while True:
            try:
                with translated(self._address):
                    for assignment in self._stub.Attend(self._messages(), wait_for_ready=False):
                        patience.success()
                        yield from self._taken(assignment)
                return
            except (ServerUnreachable, JobCancelled) as error:
                if not patience.failure():
                    raise
                logger.info("%s: %s Trying again.", self._hello.name, error)

    def _messages(self) -> Iterator[pb.SlotMessage]:
        hello = pb.SlotMessage(hello=self._hello, received=self._received)
        return itertools.chain([hello], self._outbox.messages(self._outbox.open()))

    def _taken(self, assignment: pb.Assignment) -> Iterator[pb.Assignment]:
        if assignment.WhichOneof("assignment") == "welcome":
            if self._attended and not assignment.welcome.resumed:
                self._received = 0
                self._outbox.forget()
                yield pb.Assignment(release=pb.Release())
            self._attended = True
            self._outbox.arrived(assignment.received)
        elif assignment.number > self._received:
            self._received = assignment.number
            self._outbox.arrived(assignment.received)
            yield assignment


class Questions:
    """Calls of ``Workers.Next``: one that gets no answer is made again, and the server counts it once.

    Args:
        stub: Of the Workers service.
        job: The job's identifier, and this worker's token.
        address: Of the server, for messages.
        patience_s: How long the server may be silent.
        stopped: Set when the job is over.
    """

    def __init__(
        self, stub: Any, job: tuple[str, str], address: str, patience_s: float, stopped: threading.Event
    ) -> None:
        self._stub, self._job, self._address = stub, job, address
        self._patience_s, self._stopped = patience_s, stopped
        self._calls = 0

    def ask(self, request: pb.NextRequest) -> pb.NextReply:
        """The server's answer.

        Raises:
            NfdtError: the server refuses, or did not answer in time.
        """
        self._calls += 1
        (request.job_id, request.job_token), request.call = self._job, self._calls
        patience, began = Patience(self._patience_s, self._stopped), time.monotonic()
        while True:
            try:
                with translated(self._address):
                    return self._stub.Next(request, timeout=min(NEXT_TIMEOUT_S, max(patience.left_s, LEAST_S)))
            except (ServerUnreachable, JobCancelled) as error:
                if not patience.failure(began):
                    raise
                logger.info("%s: %s Asking again.", request.worker, _first_line(error))


def _first_line(error: NfdtError) -> str:
    return str(error).partition("\n")[0]
