"""Messages and ends of the slots of one job."""

from __future__ import annotations

import threading

from nfdt.core.errors import JobFailed
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_context import JobContext
from nfdt.jobserver.job_slots import QUICK_DEATHS, QUICK_S, JobSlot
from nfdt.jobserver.outcome import SlotError
from nfdt.jobserver.pool_slot import PoolSlot, SlotMessageKind

TOO_QUICK = (
    f"{QUICK_DEATHS} workers in a row or more ended within {QUICK_S:.0f} s or before their first step, and nobody is "
    "left from before: no more are started. If memory is short, use fewer workers on one machine or a smaller "
    "batch_size."
)


class SlotEvents:
    """Handler of the events that a slot of the job is ready, has finished, has failed, or is lost. Thread-safe.

    Args:
        context: Parts of the job.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def receive(self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None) -> None:
        """Process one message; a :data:`~nfdt.jobserver.slot_pool.SlotListener`."""
        if kind == "lost":  # on a gRPC thread shared by all streams, which must not wait for the process to end
            threading.Thread(target=self._lose, args=(slot,), name=f"end of {slot.name}", daemon=True).start()
        else:
            self._take(slot, kind, message)

    def _lose(self, slot: PoolSlot) -> None:
        end, hello = self._context.server.end_of(slot.hello), slot.hello
        how = str(end or f"its process ended ({hello.pid} on {hello.host}, slot {hello.name})")
        self._take(slot, "lost", how=how)

    def _take(
        self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None = None, how: str = ""
    ) -> None:
        context = self._context
        with context.changed:
            job_slot = context.slots.job_slot_of(slot)
            if job_slot is None or job_slot.gone or context.ended:
                return
            if kind == "ready" and message is not None:
                job_slot.address = message.ready.address
            elif not (kind == "lost" and self._is_replaced(job_slot)):
                job_slot.gone = True
                self._gone(job_slot, kind, message, how)
            context.changed.notify_all()

    def _is_replaced(self, job_slot: JobSlot) -> bool:
        training = self._context.training
        return training is not None and self._context.topology.lost(job_slot, training.coordinator)

    def _gone(self, job_slot: JobSlot, kind: SlotMessageKind, message: pb.SlotMessage | None, how: str) -> None:
        if kind == "failed" and message is not None:
            self._context.termination.end(SlotError(job_slot.name, message.failed, job_slot.members))
        elif job_slot in self._context.slots.shards:
            self._shard_gone(job_slot, how or "it stopped serving")
        else:
            self._worker_gone(job_slot, how)

    def _shard_gone(self, job_slot: JobSlot, what: str) -> None:
        hello = job_slot.slot.hello
        self._context.termination.end(
            JobFailed(
                f"{job_slot.name} of the job is gone ({what}: process {hello.pid} on {hello.host}), "
                "and with it its part of the weights. Submit the job again."
            )
        )

    def _worker_gone(self, job_slot: JobSlot, how: str) -> None:
        context = self._context
        asked = context.spec.cluster.emulate.kills(job_slot.index)
        how = "it was killed, as emulate.fail asks" if how and asked else how
        if context.training is not None:
            context.training.coordinator.left(job_slot.name, how or "it left the job")
        if how and not asked and not job_slot.slot.hello.ring and context.slots.died(job_slot, how):
            context.termination.end(JobFailed(f"{context.slots.last_death}. {TOO_QUICK}"))
