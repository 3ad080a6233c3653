"""The Workers service: it registers slots, returns instructions to workers, and serves artifacts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from nfdt.core.errors import NfdtError, PolicyRefused, ProtocolError, ServerUnreachable
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire import workers_pb2_grpc
from nfdt.core.wire.channel import MAX_REPORT_BYTES
from nfdt.core.wire.chunks import split, spooled
from nfdt.core.wire.deflated import Deflater
from nfdt.core.wire.status import answering
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.pool_slot import PoolSlot
from nfdt.jobserver.scheduler import Scheduler

_log = logging.getLogger(__name__)


class WorkersService(workers_pb2_grpc.WorkersServicer):
    """Service for slot processes.

    Args:
        server: The server.
        scheduler: Scheduler that finds a worker's job.
    """

    def __init__(self, server: ServerContext, scheduler: Scheduler) -> None:
        self._pool, self._scheduler = server.pool, scheduler
        self._artifacts, self._worlds = server.artifacts, server.worlds
        self._now = server.store.now
        self._losing: set[asyncio.Task[None]] = set()

    @answering
    async def Attend(self, request_iterator: AsyncIterator[pb.SlotMessage], context: Any) -> None:
        """Serve a slot: send its assignments, receive its messages; the end of the stream is the end of the process."""
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("hello"):
            raise ProtocolError("Attend: expected a hello first. Received something else.")
        joined = self._pool.join(first.hello, first.received)
        slot, stream = joined.slot, joined.stream
        listening = asyncio.create_task(self._listen(slot, stream, request_iterator))
        try:
            if first.hello.key:
                await context.write(pb.Assignment(welcome=pb.Welcome(resumed=joined.resumed), received=slot.received))
            heartbeat, pause_s = partial(self._pool.beat, slot), partial(self._pool.beat_in_s, slot)
            async for assignment in slot.to_send.messages_on_loop(stream, heartbeat, pause_s):
                await context.write(assignment)
        finally:
            listening.cancel()
            self._pool.broke(slot, stream)
            losing = asyncio.create_task(self._pool.lose_on_loop(slot, stream))
            self._losing.add(losing)
            losing.add_done_callback(self._losing.discard)
        if slot.silence:  # the stream must not end as if the slot were dismissed: it may register again
            raise ServerUnreachable(f"{slot.silence}. It may register again.")

    async def _listen(self, slot: PoolSlot, stream: int, messages: AsyncIterator[pb.SlotMessage]) -> None:
        try:
            async for message in messages:
                if message.HasField("heartbeat"):
                    self._pool.receive(slot, message)
                else:  # a job handles it, which may take a while
                    await asyncio.to_thread(self._pool.receive, slot, message)
        except NfdtError as error:
            _log.error("slot %s is sent away: %s", slot.name, error)
            self._pool.leave(slot, stream)
        except Exception as error:
            _log.info("slot %s: the stream broke (%s)", slot.name, type(error).__name__)
        self._pool.broke(slot, stream)

    @answering
    def Ended(self, request: pb.SlotEnded, context: Any) -> pb.SlotEndedReply:
        """Record that a slot's process has ended."""
        self._pool.ended(request.name)
        return pb.SlotEndedReply()

    @answering
    async def Next(self, request: pb.NextRequest, context: Any) -> pb.NextReply | bytes:
        """Process a worker's report and return its next instruction, which may be encoded."""
        job = self._scheduler.job_of(request.job_id)
        return _ended(request) if job is None else await job.calls.next(request)

    @answering
    def NextLong(self, request_iterator: Iterator[pb.FetchChunk], context: Any) -> pb.NextReply:
        """Process a report that is too long for a message."""
        data = spooled(request_iterator, MAX_REPORT_BYTES, "Report")
        request = pb.NextRequest.FromString(bytes(data))
        job = self._scheduler.job_of(request.job_id)
        return _ended(request) if job is None else job.workers.next(request, context.is_active)

    @answering
    def FetchReply(self, request: pb.FetchReplyRequest, context: Any) -> Iterator[pb.FetchChunk]:
        """Send an answer to Next that was too long for a message."""
        job = self._scheduler.job_of(request.job_id)
        data = memoryview(b"" if job is None else job.workers.long_reply(request))
        for part in split(len(data)):
            yield pb.FetchChunk(offset=part.start, total_bytes=len(data), data=bytes(data[part]))

    @answering
    async def ReadClock(self, request: pb.ClockRequest, context: Any) -> pb.ClockReply:
        """Return this machine's time."""
        return pb.ClockReply(at=self._now())

    @answering
    def Rendezvous(self, request: pb.RendezvousRequest, context: Any) -> pb.RendezvousReply:
        """Store a value for the ranks of a ring that is forming, or return one."""
        store = self._worlds.find(request.ring, request.secret)
        if request.HasField("value"):
            store.put(request.key, request.value)
            return pb.RendezvousReply()
        return pb.RendezvousReply(value=store.get(request.key))

    @answering
    def TakeRows(self, request: pb.TakeRowsRequest, context: Any) -> pb.TakeRowsReply:
        """Give a worker rows of the job's dataset."""
        job = self._scheduler.job_of(request.job_id)
        return pb.TakeRowsReply() if job is None else job.workers.take_rows(request)

    @answering
    def Fetch(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchChunk]:
        """Send an artifact of the job, or ranges of it."""
        job = self._scheduler.job_of(request.job_id)
        if job is None or request.sha256 not in job.core.fetchable:
            raise PolicyRefused(f"Artifact {request.sha256[:80]!r} is no part of job {request.job_id[:80]!r}.")
        wanted = [(one.offset, one.length) for one in request.ranges]
        chunks = (
            self._artifacts.ranges(request.sha256, wanted)
            if wanted
            else self._artifacts.chunks(request.sha256, request.offset)
        )
        deflater = Deflater()
        for offset, total, data in chunks:
            packed, deflated = deflater.pack(data)
            yield pb.FetchChunk(offset=offset, total_bytes=total, data=packed, deflated=deflated)


def _ended(request: pb.NextRequest) -> pb.NextReply:
    return pb.NextReply(leave=pb.Leave(reason=f"Job {request.job_id} has ended."))
