"""Calls of the workers of one job: each sends a report and receives an instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nfdt.core.errors import AuthenticationFailed, NotStored
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import MESSAGE_BYTES
from nfdt.core.wire.job_token import task_ticket, worker_of
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_move, to_reply, to_report
from nfdt.jobserver.job_core import JobCore
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.worker_statistics import new_decisions, parse_statistics

MAX_WAIT_S = 30.0  # limit of one call of Next
MAX_NAME = 80  # limit of a quoted name


class WorkerCalls:
    """Handler of the workers' calls of Next, each on its own thread.

    Args:
        core: Core of the job.
    """

    def __init__(self, core: JobCore) -> None:
        self._core, self._parts = core, core.parts
        self._slots, self._mailbox = core.parts.slots, core.parts.mailbox

    def next(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply:
        """Process a worker's report and wait for its next instruction, up to the time in the request.

        A call that is repeated because its reply was lost gets the same reply; its report counts once.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
        """
        self._authenticate(request)
        if self._core.spec.method == "predict" and request.evaluated.metrics:
            outputs = request.evaluated.metrics  # they would fill the memory
            stored = self._parts.store(lambda: self._parts.server.artifacts.put(outputs))
            request.evaluated.metrics = stored.encode()
        report = to_report(request)
        self._mailbox.handle(lambda: self._receive(request, report))
        reply = self._mailbox.wait(lambda: self._reply(request, alive), min(request.wait_s, MAX_WAIT_S))
        return reply or to_reply(ins.Wait())

    def _receive(self, request: pb.NextRequest, report: ins.Report) -> None:
        job_slot = self._slots.workers.get(request.worker)
        if job_slot is not None and not 0 < request.call <= job_slot.call:
            job_slot.call, job_slot.reply = request.call, None
            self._take_statistics(job_slot, request.statistics_json)
            self._answer(job_slot, request, report)

    def _reply(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply | None:
        """Return the answer to a call once there is one; Wait if a later call has replaced it, or nobody awaits it."""
        job_slot = self._slots.workers.get(request.worker)
        if job_slot is None:
            return to_reply(ins.Leave("The job has ended."))
        if job_slot.call != request.call:
            return to_reply(ins.Wait())
        if job_slot.reply is None:
            self._answer(job_slot, request, None)
        if job_slot.reply is None and (not alive() or job_slot.slot.dismissed):
            return to_reply(ins.Wait())
        return job_slot.reply

    def _answer(self, job_slot: JobSlot, request: pb.NextRequest, report: ins.Report | None) -> None:
        instruction = self._instruct(job_slot, request, report)
        if not isinstance(instruction, ins.Wait):
            reply = to_reply(self._with_tickets(instruction, job_slot))
            job_slot.reply = _short(self._with_share(reply, job_slot), job_slot)

    def long_reply(self, request: pb.FetchReplyRequest) -> bytes:
        """Return the worker's answer with this number, encoded.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
            NotStored: The worker has another answer by now, or the job has ended.
        """
        self._authenticate(request)
        return self._mailbox.read(lambda: self._long_reply(request))

    def _long_reply(self, request: pb.FetchReplyRequest) -> bytes:
        job_slot = self._slots.workers.get(request.worker)
        if job_slot is None or job_slot.long_replies != request.number:
            raise NotStored(f"Answer {request.number} to {request.worker[:MAX_NAME]!r}: a newer one has replaced it.")
        return job_slot.long_reply

    def take_rows(self, request: pb.TakeRowsRequest) -> pb.TakeRowsReply:
        """Give a worker rows of the dataset that it runs; none if there are no more.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
        """
        self._authenticate(request)
        return self._mailbox.read(lambda: self._take_rows(request))

    def _take_rows(self, request: pb.TakeRowsRequest) -> pb.TakeRowsReply:
        if self._core.training is None or self._core.ended:
            return pb.TakeRowsReply()
        pass_index = getattr(request, "pass")  # a Python keyword
        coordinator = self._core.training.coordinator
        split = coordinator.take_rows(request.worker, request.iteration, pass_index, request.number)
        return pb.TakeRowsReply() if split is None else pb.TakeRowsReply(begin=split.begin, end=split.end)

    def _authenticate(self, request: pb.NextRequest | pb.TakeRowsRequest | pb.FetchReplyRequest) -> None:
        if worker_of(self._core.token, request.job_token) != request.worker:
            raise AuthenticationFailed(
                f"Job {self._parts.job_id}: expected the token that {request.worker[:MAX_NAME]!r} was assigned with. "
                "Received: another one."
            )

    def _instruct(self, job_slot: JobSlot, request: pb.NextRequest, report: ins.Report | None) -> ins.Instruction:
        if job_slot.gone or self._core.ended:
            return ins.Leave("The job has ended.")
        training = self._core.training
        if training is None or not job_slot.admitted or job_slot.failing_over:
            return ins.Wait()
        recovery, slots = self._core.topology.recovery, self._slots
        if request.incarnation != slots.incarnation and not (recovery is not None and recovery.running):
            training.coordinator.excuse(job_slot.name)  # its report is about shards that are gone
            return ins.Wait() if request.busy else read_move(slots.move_message(job_slot))
        return training.coordinator.next(job_slot.name, report)

    def _with_tickets(self, instruction: ins.Instruction, job_slot: JobSlot) -> ins.Instruction:
        """Add the tickets of leased tasks, which the worker shows to the shards."""
        if not isinstance(instruction, ins.Work):
            return instruction
        key, name = self._slots.shard_key.encode(), job_slot.name.encode()
        tasks = [replace(t, ticket=task_ticket(key, name, t.task, t.round, t.part)) for t in instruction.tasks]
        return replace(instruction, tasks=tuple(tasks))

    def _with_share(self, reply: pb.NextReply, job_slot: JobSlot) -> pb.NextReply:
        """Add the worker's share of the work to the beginning of an epoch."""
        if reply.HasField("begin_epoch") and (share := self._core.topology.share(job_slot.name)) is not None:
            reply.begin_epoch.share.CopyFrom(share)
        return reply

    def _take_statistics(self, job_slot: JobSlot, text: str) -> None:
        found = parse_statistics(text)
        for decision in new_decisions(job_slot.report, found):
            self._parts.job_log.record("codec", {"worker": job_slot.name, **decision})
        job_slot.report = found or job_slot.report


def _short(reply: pb.NextReply, job_slot: JobSlot) -> pb.NextReply:
    """Return the answer, or in place of a long one its number: the worker fetches it in chunks."""
    job_slot.long_reply = b""
    encoded = reply.SerializeToString()
    if len(encoded) <= MESSAGE_BYTES:
        return reply
    job_slot.long_replies += 1
    job_slot.long_reply = encoded
    return pb.NextReply(long_reply=pb.LongReply(number=job_slot.long_replies, total_bytes=len(encoded)))
