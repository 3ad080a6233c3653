"""A rank other than 0: executes the commands of rank 0."""

from __future__ import annotations

from hfdt.runtime.artifacts import OpenArtifacts
from hfdt.runtime.commands import Command
from hfdt.runtime.communicator import Communicator
from hfdt.runtime.execution import build_job, execute
from hfdt.runtime.job import RingJob
from nfdt.core.work.spans import SpanRing


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
