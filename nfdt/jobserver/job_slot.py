"""Position of one slot in a job, and the state from which the job's shards start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.wire.channel import LOOPBACK
from nfdt.core.work import instructions as ins
from nfdt.jobserver.pool_slot import PoolSlot


@dataclass(frozen=True)
class ShardState:
    """State of all shards of a job at one moment.

    Attributes:
        state: Artifact of the weights and the optimizer's variables; "": the initial state of the program.
        records: Artifact of the shards' records; "": none.
    """

    state: str = ""
    records: str = ""

    @property
    def artifacts(self) -> set[str]:
        """Names of both artifacts, without empty ones."""
        return {name for name in (self.state, self.records) if name}


class NextAnswer(NamedTuple):
    """Answer to a call of Next, as it is before it is encoded.

    Attributes:
        instruction: The instruction.
        job_slot: Position of the worker; None: it has none.
        share: Share of a group in the epoch that begins; None: the instruction has it, or there is none.
        key: Key of the shards, for the tickets of tasks.
    """

    instruction: ins.Instruction
    job_slot: JobSlot | None = None
    share: pb.GroupShare | None = None
    key: str = ""


@dataclass
class JobSlot:
    """Position of one slot in the job.

    Attributes:
        slot: The slot.
        name: Name of the shard or worker.
        index: Number of the shard or worker.
        address: Address of a shard that has started.
        gone: Whether the slot has left the job.
        members: Numbers of the workers in the group that the slot leads.
        started_at: Time of the worker's assignment; None before.
        admitted: Whether the worker takes part in the training; until then it waits.
        failing_over: Whether the process is lost, and another one will take this position.
        report: Last statistics of the worker.
        call: Number of its last call of Next.
        answer: Answer to that call, once there is one.
        long_replies: Number of answers that were too long for a message.
        long_reply: The last of them, encoded.
    """

    slot: PoolSlot
    name: str
    index: int
    address: str = ""
    gone: bool = False
    members: tuple[int, ...] = ()
    started_at: float | None = None
    admitted: bool = False
    failing_over: bool = False
    report: dict[str, Any] = field(default_factory=dict)
    call: int = 0
    answer: NextAnswer | None = None
    long_replies: int = 0
    long_reply: bytes = b""

    @property
    def host(self) -> str:
        """Host at which workers reach the slot; loopback if it states none."""
        return self.slot.hello.address or LOOPBACK

    @property
    def details(self) -> dict[str, Any]:
        """Process, host and device of the slot, for events and statistics."""
        hello = self.slot.hello
        process = {"slot": hello.name, "pid": hello.pid, "host": hello.host, "device": hello.device}
        return {**process, "group": list(self.members)} if self.members else process
