"""Execution of commands on one rank: builds the job of a command, executes an instruction."""

from __future__ import annotations

from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.commands import Command
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.group_job import GroupJob
from hfdt.runtime.job import RingJob
from hfdt.runtime.outer import Connect
from nfdt.core.program.state import load_state
from nfdt.core.specs.job import parse_job
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work import instructions as ins
from nfdt.core.work.messages import read_instruction
from nfdt.core.work.spans import SpanRing


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
