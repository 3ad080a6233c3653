"""Commands that rank 0 broadcasts and all ranks execute: one message per collective action."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.group_job import GroupJob
from hfdt.runtime.job import RingJob
from hfdt.runtime.outer import Connect
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_instruction
from nfdt.core.work.spans import SpanRing
from nfdt.model.program.state import load_state

_LENGTH = 8


@dataclass(frozen=True)
class Command:
    """Message of rank 0 to all ranks.

    Attributes:
        kind: ``job`` (build it), ``do`` (execute an instruction of the coordinator), ``release`` (drop the job),
            ``idle`` (no action: rank 0 waits, and Horovod must not consider the others stalled; an elastic ring checks
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
        """Return the command as bytes: header, reply, state."""
        header = json.dumps({"kind": self.kind, "values": self.values, "reply": len(self.reply)}).encode()
        return len(header).to_bytes(_LENGTH, "little") + header + self.reply + self.state

    @classmethod
    def decode(cls, data: bytes) -> Command:
        """Decode the result of :meth:`encode`."""
        start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        header = json.loads(data[_LENGTH:start])
        stop = start + header["reply"]
        return cls(header["kind"], header["values"], data[start:stop], data[stop:])


def build_job(
    communicator: Communicator, command: Command, artifacts: OpenArtifacts, spans: SpanRing | None = None
) -> RingJob:
    """Build the job of a command on this rank; collective. ``spans`` takes what it does."""
    if "members" in command.values:
        return build_group_job(communicator, command, artifacts, spans=spans)
    spec = parse_job(command.values["spec"])
    return RingJob(spec, communicator, artifacts(spec, command.values["artifacts"]), spans=spans)


def build_group_job(
    communicator: Communicator,
    command: Command,
    artifacts: OpenArtifacts,
    connect: Connect | None = None,
    spans: SpanRing | None = None,
) -> GroupJob:
    """Build the job of a command for a group on this rank; collective.

    Args:
        communicator: The group.
        command: The command.
        artifacts: Makes the job's artifacts readable.
        connect: Connects rank 0 to the shards; None on the others.
        spans: Takes what this rank does.
    """
    spec = parse_job(command.values["spec"])
    readable = artifacts(spec, command.values["artifacts"])
    job = GroupJob(spec, communicator, readable, command.values["members"], connect, spans)
    job.measure()
    return job


def execute(job: RingJob, command: Command, *, loads_state: bool = True) -> ins.Report:
    """Execute the instruction of a command; collective.

    Args:
        job: The job.
        command: The command; its state and learning rate are applied first.
        loads_state: Whether this rank has yet to load the state of the command.
    """
    if command.state and loads_state:
        job.step.load(load_state(command.state))
    if (rate := command.values.get("learning_rate")) is not None:
        job.step.set_learning_rate(rate)
    return job.execute(instruction_of(command))


def instruction_of(command: Command) -> ins.Instruction:
    """Return the instruction that a command carries."""
    return read_instruction(pb.NextReply.FromString(command.reply))


class Follower:
    """Rank other than 0.

    Args:
        communicator: All ranks.
        artifacts: Makes a job's artifacts readable.
        spans: Takes what this rank does.
    """

    def __init__(self, communicator: Communicator, artifacts: OpenArtifacts, spans: SpanRing | None = None) -> None:
        self._communicator, self._artifacts, self._spans = communicator, artifacts, spans
        self._job: RingJob | None = None

    def run(self) -> None:
        """Execute commands until the command to quit."""
        while (command := Command.decode(self._communicator.broadcast())).kind != "quit":
            if command.kind == "job":
                self._job = build_job(self._communicator, command, self._artifacts, self._spans)
            elif command.kind == "release":
                self._job = None
            elif command.kind == "do" and self._job is not None:
                execute(self._job, command)
