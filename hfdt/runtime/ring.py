"""A rank, and the commands that rank 0 broadcasts and all ranks execute: one message per collective action."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.communicator import Communicator, join_parts, split_parts
from hfdt.runtime.group_job import GroupJob
from hfdt.runtime.job import RingJob
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_instruction
from nfdt.core.work.spans import SpanRing
from nfdt.model.program.state import load_state


@dataclass(frozen=True)
class Command:
    """Message of rank 0 to all ranks.

    Attributes:
        kind: ``job`` (build it), ``do`` (execute an instruction of the coordinator), ``release`` (drop the job),
            ``idle`` (nothing: rank 0 waits, and Horovod must not consider the others stalled; an elastic ring checks
            for new hosts), ``quit``.
        values: JSON values: the assignment of a job; the new learning rate of an instruction.
        reply: The coordinator's ``NextReply``, serialised.
        state: State that replaces the state of the ranks (safetensors), or empty.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    reply: bytes = b""
    state: bytes = b""

    def encode(self) -> bytes:
        """Return the command as bytes."""
        return join_parts(self.kind.encode(), json.dumps(self.values).encode(), self.reply, self.state)

    @classmethod
    def decode(cls, data: bytes) -> Command:
        """Decode the result of :meth:`encode`."""
        kind, values, reply, state = split_parts(data)
        return cls(kind.decode(), json.loads(values), reply, state)

    @property
    def instruction(self) -> ins.Instruction:
        """The instruction of the coordinator that the command carries."""
        return read_instruction(pb.NextReply.FromString(self.reply))


class RingMember:
    """One rank of a ring or of a group, with its current job; all ranks execute the same commands.

    Args:
        communicator: All ranks.
        open_artifacts: Makes the artifacts of a job readable; collective.
        spans: Records what this rank does.

    Attributes:
        communicator: All ranks.
        job: The current job; None between two jobs.
        job_id: Its identifier; "" between two jobs.
    """

    def __init__(
        self, communicator: Communicator, open_artifacts: OpenArtifacts, spans: SpanRing | None = None
    ) -> None:
        self.communicator = communicator
        self._open_artifacts, self._spans = open_artifacts, spans
        self.job: Any = None
        self.job_id = ""

    def follow(self) -> None:
        """Execute the commands of the leader until the command to quit."""
        while (command := Command.decode(self.communicator.broadcast())).kind != "quit":
            self.execute(command)

    def broadcast(self, command: Command) -> ins.Report:
        """Send a command to the other ranks, and execute it with them; only the leader calls it."""
        self.communicator.broadcast(command.encode())
        return self.execute(command)

    def execute(self, command: Command) -> ins.Report:
        """Execute a command on this rank; the leader's report is sent to the coordinator. Collective."""
        if command.kind == "job":
            self.job, self.job_id = self._build(command.values), command.values["id"]
        elif command.kind == "release":
            self.job, self.job_id = None, ""
        elif command.kind == "do" and self.job is not None:
            if command.state:  # written by the coordinator since the last command
                self.job.step.load(load_state(command.state))
            if (rate := command.values.get("learning_rate")) is not None:
                self.job.step.set_learning_rate(rate)
            report: ins.Report = self.job.execute(command.instruction)
            return report
        return ins.Report()

    def _build(self, values: Mapping[str, Any]) -> RingJob:
        spec = parse_job(values["spec"])
        artifacts = self._open_artifacts(spec, values["artifacts"])
        if "members" not in values:
            return RingJob(spec, self.communicator, artifacts, spans=self._spans)
        # Speeds are measured by the ranks that train: the cost of a step in a group cannot be measured elsewhere.
        job = GroupJob(spec, self.communicator, artifacts, values["members"], self._spans)
        job.measure()
        return job

    def statistics(self) -> dict[str, Any]:
        """Return the totals of the job over all ranks."""
        totals: dict[str, Any] = self.job.statistics()
        return totals
