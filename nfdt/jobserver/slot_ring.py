"""A ring whose ranks are worker slots of the pool: it assigns ranks, and records the first failure."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import json_format

from nfdt.core.errors import JobFailed, NfdtError, UsageError
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import is_loopback
from nfdt.jobserver.job_log import JobLog
from nfdt.jobserver.job_slots import JobSlots
from nfdt.jobserver.outcome import SlotError
from nfdt.jobserver.placement import MachineId, machine_of
from nfdt.jobserver.pool_slot import PoolSlot, SlotMessageKind
from nfdt.launch.horovod import RING_END_S
from nfdt.launch.horovod_command import RingShape
from nfdt.launch.horovod_log import RingStall
from nfdt.launch.ring import RANK_TIMEOUT_S, place_ranks
from nfdt.launch.world_store import WorldStore

FORM_S = 2.0 * RANK_TIMEOUT_S  # limit from the assignment of the ranks until all have joined


class SlotRing:
    """Ring of ranks in worker slots; a :class:`~nfdt.launch.ring.Ring`. Thread-safe.

    Args:
        name: Name of the ring.
        shape: Shape of the ring.
        end_of: Returns the text about the end of a slot's process, after waiting for it.
        failed: Called once when the ring fails, with the error of the job's code in a rank, if that is the reason.
        job_log: Log of the job, for output and spans of the ranks.

    Attributes:
        slots: Slots of the ranks, by rank; empty before they are taken.
    """

    def __init__(
        self,
        name: str,
        shape: RingShape,
        *,
        end_of: Callable[[pb.SlotHello], str],
        failed: Callable[[SlotRing, SlotError | None], None],
        job_log: JobLog,
    ) -> None:
        self.name, self.shape = name, shape
        self._end_of, self._failed, self._job_log = end_of, failed, job_log
        self._changed = threading.Condition()
        self.slots: tuple[PoolSlot, ...] = ()
        self._joined: set[int] = set()
        self._cause: NfdtError | None = None
        self._report: pb.SlotFailed | None = None
        self._ended = False

    # ---- the job's view

    @property
    def origin(self) -> str:
        """Slots of the ranks."""
        if not self.slots:
            return f"{self.shape.size} worker slots"
        ranks = (f"{rank}: {slot.name} on {slot.hello.host}" for rank, slot in enumerate(self.slots))
        return f"ranks in worker slots ({', '.join(ranks)})"

    @property
    def log(self) -> str:
        """Logs of the slots, which are on their machines."""
        return f"the logs of the slots {', '.join(slot.name for slot in self.slots) or '(none)'}"

    @property
    def awaited_slots(self) -> int:
        """Number of slots before they are taken, 0 afterwards."""
        return 0 if self.slots or self.failure else self.shape.size

    @property
    def failure(self) -> str | None:
        """Reason of the ring's end; None while it forms or runs."""
        with self._changed:
            return None if self._cause is None else str(self._cause)

    @property
    def ended(self) -> bool:
        """Whether the ring has been ended."""
        with self._changed:
            return self._ended

    def why(self, timeout_s: float = RING_END_S) -> NfdtError | None:
        """Return the reason of the ring's end, after waiting for it; None if it still runs."""
        with self._changed:
            self._changed.wait_for(lambda: self._cause is not None, timeout_s)
            return self._cause

    def report(self) -> dict[str, Any] | None:
        """Return the failure that a rank reported, if there is one."""
        with self._changed:
            return json_format.MessageToDict(self._report, preserving_proto_field_name=True) if self._report else None

    def messages(self) -> tuple[list[RingStall], list[str]]:
        """Return nothing: the ranks' output is in the logs of their slots."""
        return [], []

    # ---- forming

    def assign(
        self,
        slots: Sequence[PoolSlot],
        job: JobSlots,
        store: WorldStore,
        others: Counter[MachineId],
    ) -> None:
        """Make the slots ranks, in this order.

        Args:
            slots: The slots.
            job: Slots of the job.
            store: Rendezvous of the ranks.
            others: Number of the job's ranks in other rings, by machine.
        """
        self.slots = tuple(slots)
        machines = [machine_of(slot.hello) for slot in slots]
        several = len(set(machines)) > 1
        variables = {**self.shape.variables, **({"HOROVOD_ELASTIC": "1"} if self.shape.elastic.elastic else {})}
        for place, slot, machine in zip(place_ranks(machines), slots, machines, strict=True):
            message = pb.RankAssignment(
                job_id=job.job_id,
                ring=self.name,
                rank=place.rank,
                environment=place.environment(variables),
                host=reached_at(slot.hello) if several else "",
                members=self.shape.members,
                neighbours=others[machine],
                secret=store.secret,
                artifact_dir=job.artifact_dir(slot),
                elastic=self.shape.elastic.elastic,
            )
            slot.send(pb.Assignment(rank=message))

    def await_ranks(self) -> None:
        """Wait until all ranks have joined, or the ring has failed or ended; fail it if that takes too long."""
        with self._changed:
            formed = self._changed.wait_for(
                lambda: self._ended or self._cause is not None or len(self._joined) == len(self.slots), FORM_S
            )
            missing = [str(rank) for rank in range(len(self.slots)) if rank not in self._joined]
        if not formed:
            self.fail(f"ranks {', '.join(missing)} did not join within {FORM_S:.0f} s")

    # ---- messages of the slots

    def receive(self, slot: PoolSlot, kind: SlotMessageKind, message: pb.SlotMessage | None) -> None:
        """Process a message of a rank; a :data:`~nfdt.jobserver.pool_slot.SlotListener`."""
        if slot not in self.slots:  # it was lost before it got its rank
            if kind not in ("output", "spans"):
                self.fail(f"slot {slot.name} is lost")
            return
        rank = self.slots.index(slot)
        match kind, message:
            case "output" | "spans", pb.SlotMessage():
                self._job_log.write_message(f"rank-{rank}", message)
            case "ready", _:
                with self._changed:
                    self._joined.add(rank)
                    self._changed.notify_all()
            case "failed", pb.SlotMessage():
                self._fail_by_rank(rank, message.failed)
            case _:  # on a thread of gRPC, which must not wait for the process to end
                threading.Thread(target=self._lose, args=(rank, slot), name=f"end of {slot.name}", daemon=True).start()

    def _fail_by_rank(self, rank: int, failed: pb.SlotFailed) -> None:
        error = SlotError("the ring", failed, self.shape.members)
        if error.lost_connection:  # the end of another rank is the better explanation
            with self._changed:
                self._changed.wait_for(lambda: self._cause is not None, RING_END_S)
            self.fail(f"rank {rank}: {failed.message}")
        else:
            self.fail(str(error), failed)

    def _lose(self, rank: int, slot: PoolSlot) -> None:
        self.fail(f"rank {rank} is lost: {slot.silence or self._end_of(slot.hello)}")

    def fail(self, reason: str, report: pb.SlotFailed | None = None) -> None:
        """Record why the ring ended, unless an earlier reason is known; see :meth:`refuse`."""
        reason = reason.removesuffix(".")
        self.refuse(JobFailed(f"The ring of {self.shape.size} ranks ended: {reason}. It had {self.origin}."), report)

    def refuse(self, cause: NfdtError, report: pb.SlotFailed | None = None) -> None:
        """Record why the ring cannot go on, unless an earlier reason is known.

        Args:
            cause: The reason.
            report: Message of the rank whose code raised, if that is the reason.
        """
        with self._changed:
            if self._cause is not None or self._ended:
                return
            self._cause, self._report = cause, report
            self._changed.notify_all()
        self._failed(self, SlotError("the ring", report, self.shape.members) if report is not None else None)

    def end(self) -> bool:
        """Record that the job needs the ring no more; return whether the ranks may finish in order."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._cause is None


def reached_at(hello: pb.SlotHello) -> str:
    """Return the address at which other machines reach a slot.

    Raises:
        UsageError: The slot is reached on loopback only.
    """
    if not hello.address or is_loopback(hello.address):
        raise UsageError(
            f"Slot {hello.name} on {hello.host}: expected an address at which the ranks on other machines reach it. "
            f"Received: {hello.address or 'none'}. Start its `nfdt worker` with --host, or the server with --advertise."
        )
    return hello.address
