"""Calls of the workers of one job: each sends a report and receives an instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nfdt.core.errors import AuthenticationFailed
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.job_token import task_ticket, worker_of
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_move, to_reply, to_report
from nfdt.jobserver.job_context import JobContext
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.worker_statistics import new_decisions, parse_statistics

MAX_WAIT_S = 30.0  # limit of one call of Next
MAX_NAME = 80  # limit of a quoted name


class WorkerCalls:
    """Handler of the workers' calls of Next, each on its own thread.

    Args:
        context: Parts of the job.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def next(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply:
        """Process a worker's report and wait for its next instruction, up to the time in the request.

        A call that is repeated because its reply was lost gets the same reply; its report counts once.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
        """
        context = self._context
        self._authenticate(request)
        if context.spec.method == "predict" and request.evaluated.metrics:
            outputs = request.evaluated.metrics  # they would fill the memory
            request.evaluated.metrics = context.store(lambda: context.server.artifacts.put(outputs)).encode()
        report: ins.Report | None = to_report(request)
        deadline = context.clock.now() + min(request.wait_s, MAX_WAIT_S)
        with context.changed:
            job_slot = context.slots.workers.get(request.worker)
            if job_slot is None:
                return to_reply(ins.Leave("The job has ended."))
            if request.call and request.call <= job_slot.call:
                report = None
            else:
                job_slot.call, job_slot.reply = request.call, None
                self._take_statistics(job_slot, request.statistics_json)
            while job_slot.call == request.call and job_slot.reply is None:
                instruction = self._instruct(job_slot, request, report)
                if report is not None:
                    context.changed.notify_all()
                    report = None
                if not isinstance(instruction, ins.Wait):
                    job_slot.reply = self._with_share(to_reply(self._with_tickets(instruction, job_slot)), job_slot)
                elif (left := deadline - context.clock.now()) <= 0 or not alive() or job_slot.slot.dismissed:
                    break
                else:
                    context.changed.wait(left)
            return (job_slot.reply if job_slot.call == request.call else None) or to_reply(ins.Wait())

    def take_rows(self, request: pb.TakeRowsRequest) -> pb.TakeRowsReply:
        """Give a worker rows of the dataset that it runs; none if there are no more.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
        """
        context = self._context
        self._authenticate(request)
        with context.changed:
            if context.training is None or context.ended:
                return pb.TakeRowsReply()
            pass_index = getattr(request, "pass")  # a Python keyword
            coordinator = context.training.coordinator
            split = coordinator.take_rows(request.worker, request.iteration, pass_index, request.number)
            return pb.TakeRowsReply() if split is None else pb.TakeRowsReply(begin=split.begin, end=split.end)

    def _authenticate(self, request: pb.NextRequest | pb.TakeRowsRequest) -> None:
        if worker_of(self._context.token, request.job_token) != request.worker:
            raise AuthenticationFailed(
                f"Job {self._context.job_id}: expected the token that {request.worker[:MAX_NAME]!r} was assigned with. "
                "Received: another one."
            )

    def _instruct(self, job_slot: JobSlot, request: pb.NextRequest, report: ins.Report | None) -> ins.Instruction:
        if job_slot.gone or self._context.ended:
            return ins.Leave("The job has ended.")
        training = self._context.training
        if training is None or not job_slot.admitted or job_slot.failing_over:
            return ins.Wait()
        recovery, slots = self._context.topology.recovery, self._context.slots
        if request.incarnation != slots.incarnation and not (recovery is not None and recovery.running):
            training.coordinator.excuse(job_slot.name)  # its report is about shards that are gone
            return ins.Wait() if request.busy else read_move(slots.move_message(job_slot))
        return training.coordinator.next(job_slot.name, report)

    def _with_tickets(self, instruction: ins.Instruction, job_slot: JobSlot) -> ins.Instruction:
        """Add the tickets of leased tasks, which the worker shows to the shards."""
        if not isinstance(instruction, ins.Work):
            return instruction
        key, name = self._context.slots.shard_key.encode(), job_slot.name.encode()
        tasks = [replace(t, ticket=task_ticket(key, name, t.task, t.round, t.part)) for t in instruction.tasks]
        return replace(instruction, tasks=tuple(tasks))

    def _with_share(self, reply: pb.NextReply, job_slot: JobSlot) -> pb.NextReply:
        """Add the worker's share of the work to the beginning of an epoch."""
        if reply.HasField("begin_epoch") and (share := self._context.topology.share(job_slot.name)) is not None:
            reply.begin_epoch.share.CopyFrom(share)
        return reply

    def _take_statistics(self, job_slot: JobSlot, text: str) -> None:
        found = parse_statistics(text)
        for decision in new_decisions(job_slot.report, found):
            self._context.job_log.record("codec", {"worker": job_slot.name, **decision})
        job_slot.report = found or job_slot.report
