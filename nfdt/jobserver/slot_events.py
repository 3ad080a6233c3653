"""Messages and ends of the slots of one job."""

from __future__ import annotations

import logging
from functools import partial

from nfdt.core.errors import JobFailed, NfdtError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.jobserver.job_core import JobCore
from nfdt.jobserver.job_slot import JobSlot
from nfdt.jobserver.job_slots import QUICK_DEATHS, QUICK_S
from nfdt.jobserver.outcome import PartLost, SlotError
from nfdt.jobserver.pool_slot import PoolSlot, SlotMessageKind

_log = logging.getLogger(__name__)

TOO_QUICK = (
    f"{QUICK_DEATHS} workers in a row or more ended within {QUICK_S:.0f} s or before their first step, and nobody is "
    "left from before: no more are started. If memory is short, use fewer workers on one machine or a smaller "
    "batch_size."
)


class SlotEvents:
    """Handler of the events that a slot of the job is ready, has finished, has failed, or is lost. Thread-safe.

    Args:
        core: Core of the job.
    """

    def __init__(self, core: JobCore) -> None:
        self._core, self._parts = core, core.parts
        self._slots, self._mailbox = core.parts.slots, core.parts.mailbox

    def receive(self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None) -> None:
        """Process one message; a :data:`~nfdt.jobserver.pool_slot.SlotListener`."""
        if kind == "lost":  # on a gRPC thread shared by all streams, which must not wait for the process to end
            self._mailbox.start(partial(self._lose, slot), f"end of {slot.name}")
        elif kind == "draining":
            self._mailbox.start(partial(self._hand_over, slot), f"end of {slot.name}")
        else:
            self._mailbox.handle(lambda: self._take(slot, kind, message))

    def _lose(self, slot: PoolSlot) -> None:
        end, hello = self._parts.server.end_of(slot.hello), slot.hello
        how = str(end or f"its process ended ({hello.pid} on {hello.host}, slot {hello.name})")
        self._mailbox.handle(lambda: self._take(slot, "lost", how=how))

    def _hand_over(self, slot: PoolSlot) -> None:
        """Move the shard of a slot that is about to end; a worker reports its step and leaves by itself."""
        training, job_slot = self._mailbox.handle(lambda: (self._core.training, self._slots.job_slot_of(slot)))
        if training is None or training.recovery is None or job_slot not in self._slots.shards:
            return
        try:
            training.recovery.take()
        except NfdtError as error:  # the shards go on from the snapshot before
            _log.warning("job %s: no last snapshot of %s: %s", self._parts.job_id, job_slot.name, error)

        def leave() -> bool:
            leaves = job_slot.slot is slot and not job_slot.failing_over and not self._core.ended
            return leaves and self._core.topology.lost(job_slot, "its process was asked to end")

        if self._mailbox.handle(leave):
            self._parts.server.pool.release(slot, self._parts.job_id)

    def _take(
        self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None = None, how: str = ""
    ) -> None:
        core, job_slot = self._core, self._slots.job_slot_of(slot)
        if job_slot is None or job_slot.gone or core.ended:
            return
        if kind == "ready" and message is not None:
            if message.ready.incarnation == self._slots.incarnation:
                job_slot.address = message.ready.address
        elif not (kind == "lost" and core.training is not None and core.topology.lost(job_slot, how)):
            job_slot.gone = True
            self._gone(job_slot, kind, message, how)

    def _gone(self, job_slot: JobSlot, kind: SlotMessageKind, message: pb.SlotMessage | None, how: str) -> None:
        error = SlotError(job_slot.name, message.failed, job_slot.members) if message and kind == "failed" else None
        if error is not None and not (error.lost_connection and self._may_lose(job_slot)):
            self._mailbox.end(error)
        elif job_slot in self._slots.shards:
            self._shard_gone(job_slot, how or "it stopped serving")
        else:
            self._worker_gone(job_slot, how if error is None else str(error))

    def _may_lose(self, job_slot: JobSlot) -> bool:
        """Whether the loss of a connection to a shard is only the loss of this worker."""
        return self._core.topology.recovery is not None and job_slot not in self._slots.shards

    def _shard_gone(self, job_slot: JobSlot, what: str) -> None:
        hello = job_slot.slot.hello
        text = f"{job_slot.name} is gone ({what}: process {hello.pid} on {hello.host}), with a part of the weights."
        self._mailbox.end(PartLost(text) if self._core.topology.view.pushes else JobFailed(text))

    def _worker_gone(self, job_slot: JobSlot, how: str) -> None:
        asked = self._core.spec.cluster.emulate.kills(job_slot.index)
        how = "it was killed, as emulate.fail asks" if how and asked else how
        if self._core.training is not None:
            self._core.training.coordinator.left(job_slot.name, how or "it left the job")
        if how and not asked and not job_slot.slot.hello.ring and self._slots.died(job_slot, how):
            self._mailbox.end(JobFailed(f"{self._slots.last_death}. {TOO_QUICK}"))
