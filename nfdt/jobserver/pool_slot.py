"""One registered slot process, and the job that uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from nfdt.core.specs.job import ClusterSpec
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.resend_queue import ResendQueue

SlotMessageKind = Literal["ready", "draining", "output", "spans", "finished", "failed", "lost"]
SlotListener = Callable[["PoolSlot", SlotMessageKind, "pb.SlotMessage | None"], None]
SlotChoice = Callable[[Sequence["PoolSlot"], int], Sequence["PoolSlot"]]
"""Chooses from the free slots, in order of registration, at most a number of them."""


_NAMES: Mapping[str, Callable[[Any], str]] = {  # of the process in the job, by the kind of its assignment
    "shard": lambda shard: f"shard-{shard.index}",
    "worker": lambda worker: str(worker.worker),
    "rank": lambda rank: f"rank-{rank.rank}",
}


@dataclass(eq=False, slots=True)
class PoolSlot:
    """One registered process. Only the :class:`~nfdt.jobserver.slot_pool.SlotPool` changes it.

    Attributes:
        hello: First message of the process.
        job_id: Job that uses it; None: it is free.
        assigned: Whether it has been sent an assignment of that job; otherwise no release message is needed.
        used: Whether it has been sent an assignment of any job.
        session: Client session whose code it has run; "" for none: it can serve any session.
        code_user: Number of the user as which a slot of root runs code of that session; None: it has run none.
        dismissed: Whether it was requested to exit, or has ended.
        listener: Function of the job that receives its messages; None: no job uses it.
        released: Whether the job has released it: until the process has dropped the job, only output and spans are
            forwarded.
        to_send: Assignments to send to the process.
        stream: Number of its current stream.
        away: Whether that stream broke and the process may still resume it.
        received: Number of its last message.
        heartbeat_s: Seconds between its heartbeats that its job requests.
        lost_s: Seconds without a message after which it is lost, if its heartbeats come as its job requests.
        every_s: Seconds between its heartbeats; more than ``heartbeat_s`` on a server with many slots.
        told: Whether the server has sent it that interval.
        heard_at: Time of its last message, on the pool's clock.
        beats: Whether it sends heartbeats; the silence of others means nothing.
        silence: Why it was removed, if that was for its silence.
        process: Name of the process in its job, as ``worker-0``; "" before its first assignment.
        usage: What it uses, as last reported.
        stacks: Where its threads were when that was last asked.
        answers: Number of these answers.
    """

    hello: pb.SlotHello
    job_id: str | None = None
    assigned: bool = False
    used: bool = False
    session: str = ""
    code_user: int | None = None
    dismissed: bool = False
    listener: SlotListener | None = None
    released: bool = False
    to_send: ResendQueue[pb.Assignment] = field(default_factory=ResendQueue)
    stream: int = 0
    away: bool = False
    received: int = 0
    heartbeat_s: float = ClusterSpec().heartbeat_s
    lost_s: float = ClusterSpec().lost_s
    every_s: float = ClusterSpec().heartbeat_s
    told: bool = False
    heard_at: float = 0.0
    beats: bool = False
    silence: str = ""
    process: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    stacks: str = ""
    answers: int = 0

    @property
    def name(self) -> str:
        """Name of the slot."""
        return self.hello.name

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of Python, Keras and TensorFlow in the process."""
        return dict(self.hello.versions)

    @property
    def stretch(self) -> float:
        """How many times longer than its job requests it waits between two heartbeats; 1 on a server with few slots."""
        return max(1.0, self.every_s / self.heartbeat_s)

    def send(self, assignment: pb.Assignment) -> None:
        """Send an assignment to the process."""
        if name := _NAMES.get(kind := assignment.WhichOneof("assignment") or ""):
            self.assigned = self.used = True
            self.process = name(getattr(assignment, kind))
            if self.code_user is not None:
                assignment.code_user = self.code_user
        assignment.received = self.received
        self.to_send.put(assignment)


class JoinedSlot(NamedTuple):
    """Slot, number of its current stream, and whether it had an earlier one."""

    slot: PoolSlot
    stream: int
    resumed: bool


@dataclass(frozen=True)
class SlotUser:
    """Job that takes slots.

    Attributes:
        job_id: The job.
        session: Client session of the job: a slot that has run code of one session never serves another.
        code: Whether the job carries code.
        cluster: Cluster of the job, whose slots send heartbeats as it says.
        listener: Function that receives the slots' messages, and their loss; called without any lock held.
    """

    job_id: str
    session: str = ""
    code: bool = False
    listener: SlotListener | None = None
    cluster: ClusterSpec = ClusterSpec()
