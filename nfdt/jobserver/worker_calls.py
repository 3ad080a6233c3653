"""Handlers of what the slots of one job send: the calls of its workers, and the messages and losses of its slots."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nfdt.core.errors import AuthenticationFailed, JobFailed, NfdtError, NotStored
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import MESSAGE_BYTES
from nfdt.core.wire.job_token import task_ticket, worker_of
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_move, to_reply, to_report
from nfdt.jobserver.capacity import describe_need, model_bytes
from nfdt.jobserver.job_core import JobCore
from nfdt.jobserver.job_slot import JobSlot, NextAnswer
from nfdt.jobserver.job_slots import QUICK_DEATHS, QUICK_S
from nfdt.jobserver.outcome import PartLost, SlotError
from nfdt.jobserver.pool_slot import PoolSlot, SlotMessageKind

_log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0  # limit of one call of Next
MAX_NAME = 80  # limit of a quoted name
MAX_STATISTICS_BYTES = 2**20
TOO_QUICK = (
    f"{QUICK_DEATHS} workers in a row or more ended within {QUICK_S:.0f} s or before their first step, and nobody is "
    "left from before: no more are started. If memory is short, use fewer workers on one machine or a smaller "
    "batch_size."
)


class WorkerCalls:
    """Handler of the workers' calls of Next.

    Args:
        core: Core of the job.
    """

    def __init__(self, core: JobCore) -> None:
        self._core, self._slots, self._mailbox = core, core.slots, core.mailbox

    def next(self, request: pb.NextRequest, alive: Callable[[], bool]) -> pb.NextReply:
        """Process a worker's report and wait, on this thread, for its next instruction, up to the time in the request.

        A call that is repeated because its reply was lost gets the same reply; its report counts once.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
        """
        report = self.check(request)
        self._mailbox.handle(lambda: self.receive(request, report))
        answer = self._mailbox.wait(lambda: self.ask(request, alive), min(request.wait_s, MAX_WAIT_S))
        return pb.NextReply.FromString(self.encode(answer or NextAnswer(ins.Wait())))

    def check(self, request: pb.NextRequest) -> ins.Report:
        """Return the report of a call.

        Raises:
            AuthenticationFailed: The token belongs to another worker.
        """
        self._authenticate(request)
        if self._core.spec.method == "predict" and request.evaluated.metrics:
            outputs = request.evaluated.metrics  # they would fill the memory
            stored = self._core.store(lambda: self._core.server.artifacts.put(outputs))
            request.evaluated.metrics = stored.encode()
        return to_report(request)

    def receive(self, request: pb.NextRequest, report: ins.Report) -> None:
        """Process the report of a call, if it is new; a message."""
        job_slot = self._slots.workers.get(request.worker)
        if job_slot is not None and not 0 < request.call <= job_slot.call:
            job_slot.call, job_slot.answer = request.call, None
            self._record_statistics(job_slot, request.statistics_json)
            self._answer(job_slot, request, report)

    def ask(self, request: pb.NextRequest, alive: Callable[[], bool] = lambda: True) -> NextAnswer | None:
        """Return the answer to a call once there is one; Wait if a later call has replaced it, or nobody awaits it."""
        job_slot = self._slots.workers.get(request.worker)
        if job_slot is None:
            return NextAnswer(ins.Leave("The job has ended."))
        if job_slot.call != request.call:
            return NextAnswer(ins.Wait())
        if job_slot.answer is None:
            self._answer(job_slot, request, None)
        if job_slot.answer is None and (not alive() or job_slot.slot.dismissed):
            return NextAnswer(ins.Wait())
        return job_slot.answer

    def _answer(self, job_slot: JobSlot, request: pb.NextRequest, report: ins.Report | None) -> None:
        instruction = self._instruct(job_slot, request, report)
        if isinstance(instruction, ins.Wait):
            return
        begins = isinstance(instruction, ins.BeginEpoch)
        share = self._core.topology.share(job_slot.name) if begins else None
        job_slot.answer = NextAnswer(instruction, job_slot, share, self._slots.shard_key)

    def is_plain(self, answer: NextAnswer | None) -> bool:
        """Whether an answer is work, and nothing else has changed that others of a job on arrays wait for."""
        training = self._core.training
        if answer is None or training is None or self._core.spec.train.kind != "arrays":
            return False
        coordinator = training.coordinator
        in_training = coordinator.phase == "train"  # otherwise the report may have ended the validation of this epoch
        return in_training and isinstance(answer.instruction, ins.Work) and not coordinator.has_effects

    def waits_as_others(self, request: pb.NextRequest) -> bool:
        """Whether, as this call waits, all others that wait go on waiting."""
        training, job_slot = self._core.training, self._slots.workers.get(request.worker)
        admitted = job_slot is not None and job_slot.admitted and not job_slot.failing_over
        return admitted and training is not None and training.coordinator.wait_alike

    def encode(self, answer: NextAnswer) -> bytes:
        """Return an answer as the bytes of a NextReply; a long one as its number: the worker fetches it in chunks."""
        instruction, job_slot = answer.instruction, answer.job_slot
        if isinstance(instruction, ins.Work) and job_slot is not None:
            # A shard applies only pushes with a ticket of their task: a worker cannot push what it was not leased.
            key, name = answer.key.encode(), job_slot.name.encode()
            tasks = [replace(t, ticket=task_ticket(key, name, t.task, t.round, t.part)) for t in instruction.tasks]
            instruction = replace(instruction, tasks=tuple(tasks))
        reply = to_reply(instruction)
        if answer.share is not None:
            reply.begin_epoch.share.CopyFrom(answer.share)
        encoded = reply.SerializeToString()
        if job_slot is None or (len(encoded) <= MESSAGE_BYTES and not job_slot.long_reply):
            return encoded
        return self._mailbox.read(lambda: _short(encoded, job_slot))

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
        return pb.TakeRowsReply() if split is None else pb.TakeRowsReply(begin=split.start, end=split.stop)

    def _authenticate(self, request: pb.NextRequest | pb.TakeRowsRequest | pb.FetchReplyRequest) -> None:
        if worker_of(self._slots.token, request.job_token) != request.worker:
            raise AuthenticationFailed(
                f"Job {self._core.job_id}: expected the token that {request.worker[:MAX_NAME]!r} was assigned with. "
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
            # Its report is about shards that are gone, so the coordinator must not see it, only that the worker lives.
            training.coordinator.excuse(job_slot.name)
            return ins.Wait() if request.busy else read_move(slots.move_message(job_slot))
        return training.coordinator.next(job_slot.name, report)

    def _record_statistics(self, job_slot: JobSlot, text: str) -> None:
        found = parse_statistics(text)
        for decision in new_decisions(job_slot.report, found):
            self._core.job_log.record("codec", {"worker": job_slot.name, **decision})
        job_slot.report = found or job_slot.report


def _short(encoded: bytes, job_slot: JobSlot) -> bytes:
    """Return the answer, or in place of a long one its number."""
    job_slot.long_reply = b""
    if len(encoded) <= MESSAGE_BYTES:
        return encoded
    job_slot.long_replies += 1
    job_slot.long_reply = encoded
    long_reply = pb.LongReply(number=job_slot.long_replies, total_bytes=len(encoded))
    return pb.NextReply(long_reply=long_reply).SerializeToString()


def parse_statistics(text: str) -> dict[str, Any]:
    """Return the totals of a worker; empty if they cannot be read, because statistics never fail a job."""
    if not text or len(text) > MAX_STATISTICS_BYTES:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def new_decisions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the codec decisions of a worker between two of its reports; empty if they cannot be read."""

    def decisions(report: Mapping[str, Any]) -> list[dict[str, Any]]:
        codecs = report.get("codecs")
        found = codecs.get("decisions") if isinstance(codecs, dict) else None
        listed = found if isinstance(found, list) else []
        return [d for d in listed if isinstance(d, dict) and isinstance(d.get("at_push"), int)]

    known = max((decision["at_push"] for decision in decisions(before)), default=0)
    return [decision for decision in decisions(after) if decision["at_push"] > known]


class SlotEvents:
    """Handler of the messages of the job's slots, and of their loss. Thread-safe.

    Args:
        core: Core of the job.
    """

    def __init__(self, core: JobCore) -> None:
        self._core, self._slots, self._mailbox = core, core.slots, core.mailbox

    def receive(self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None) -> None:
        """Process one message; a :data:`~nfdt.jobserver.pool_slot.SlotListener`."""
        if kind == "lost":  # on a gRPC thread shared by all streams, which must not wait for the process to end
            self._mailbox.start(partial(self._lose, slot), f"end of {slot.name}")
        elif kind == "draining":
            self._mailbox.start(partial(self._hand_over, slot), f"end of {slot.name}")
        elif message is not None and kind in ("output", "spans"):
            if job_slot := self._mailbox.read(lambda: self._slots.job_slot_of(slot)):
                self._core.job_log.write_message(job_slot.name, message)
        else:
            self._mailbox.handle(lambda: self._record(slot, message))

    def _lose(self, slot: PoolSlot) -> None:
        server = self._core.server
        if slot.silence:  # a process of this machine would keep its place in the launcher
            how, killed = slot.silence, False
            server.kill(slot.hello)
        else:
            how, killed = server.end_of(slot.hello), server.was_killed(slot.hello)

        def lose() -> None:
            job_slot, topology = self._member(slot), self._core.topology
            if job_slot is None or (self._core.training is not None and topology.lost(job_slot, how, killed=killed)):
                return
            if job_slot in self._slots.shards:
                self._fail_without(job_slot, how, killed=killed)
            else:
                self._worker_gone(job_slot, how)

        self._mailbox.handle(lose)

    def _member(self, slot: PoolSlot) -> JobSlot | None:
        """Return the position of a slot that is still in the job; None after the job has ended."""
        job_slot = self._slots.job_slot_of(slot)
        return None if job_slot is None or job_slot.gone or self._core.ended else job_slot

    def _hand_over(self, slot: PoolSlot) -> None:
        """Move the shard of a slot that is about to end; a worker reports its step and leaves by itself."""
        training, job_slot = self._mailbox.handle(lambda: (self._core.training, self._slots.job_slot_of(slot)))
        if training is None or training.recovery is None or job_slot not in self._slots.shards:
            return
        try:
            training.recovery.store_snapshot()
        except NfdtError as error:  # the shards go on from the snapshot before
            _log.warning("job %s: no last snapshot of %s: %s", self._core.job_id, job_slot.name, error)

        def leave() -> bool:
            leaves = job_slot.slot is slot and not job_slot.failing_over and not self._core.ended
            return leaves and self._core.topology.lost(job_slot, "its process was asked to end")

        if self._mailbox.handle(leave):
            self._core.server.pool.release(slot, self._core.job_id)

    def _record(self, slot: PoolSlot, message: pb.SlotMessage | None) -> None:
        """Note the address of a shard that is ready, or the end of a slot's work."""
        job_slot = self._member(slot)
        if job_slot is None or message is None:
            return
        if message.HasField("ready"):
            if message.ready.incarnation == self._slots.incarnation:
                job_slot.address = message.ready.address
            return
        is_shard, how = job_slot in self._slots.shards, ""
        if message.HasField("failed"):
            error = SlotError(job_slot.name, message.failed, job_slot.members)
            # Where shards are restored, a worker that loses its connection to one is no reason to end the job.
            if is_shard or not error.lost_connection or self._core.topology.recovery is None:
                job_slot.gone = True
                self._mailbox.end(error)
                return
            how = str(error)
        if is_shard:
            self._fail_without(job_slot, "it stopped serving")
        else:
            self._worker_gone(job_slot, how)

    def _fail_without(self, shard: JobSlot, what: str, *, killed: bool = False) -> None:
        """End the run, because a shard is gone that is not restored."""
        shard.gone, hello, core = True, shard.slot.hello, self._core
        text = f"{shard.name} is gone ({what}: process {hello.pid} on {hello.host}), with a part of the weights."
        if killed:
            model = model_bytes(core.spec, core.manifest, core.server.artifacts)
            text += f" {describe_need(core.spec, model, core.server.capacity())}"
        self._mailbox.end(PartLost(text) if self._core.topology.view.pushes else JobFailed(text))

    def _worker_gone(self, job_slot: JobSlot, how: str) -> None:
        job_slot.gone = True
        asked = bool(self._core.spec.cluster.emulate.last_steps(job_slot.index))
        how = "it was killed, as emulate.fail asks" if how and asked else how
        if self._core.training is not None:
            self._core.training.coordinator.left(job_slot.name, how or "it left the job")
        if how and not asked and not job_slot.slot.hello.ring and self._slots.died(job_slot, how):
            self._mailbox.end(JobFailed(f"{self._slots.last_death}. {TOO_QUICK}"))
