"""A submitted job, the control messages that its script may send, and the line that announces it."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nfdt.core.errors import NfdtError
from nfdt.core.events import MAX_LOGS_BYTES, Event
from nfdt.core.specs.job import JobSpec
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import NO_WEIGHTS, Contents, State
from nfdt_client.connection import JobsClient
from nfdt_client.upload import Blob, fetch_state, upload

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Submission:
    """A job's specification, all artifacts it names, and the name by which a later script finds it ("": none)."""

    spec: JobSpec
    blobs: dict[str, Blob]
    name: str = ""


def job_names(name: str | None) -> Iterator[str]:
    """Yield the names of the jobs of successive fits: NAME, NAME-2, NAME-3 and so on; "" without a first name."""
    if name is None:
        yield from itertools.repeat("")
    else:
        yield name
        yield from (f"{name}-{number}" for number in itertools.count(2))


class StateLost(NfdtError):
    """The server was restarted before it had stored a state; the steps that led to it are repeated."""


@dataclass(frozen=True)
class InteractiveJob:
    """The client's side of a job whose callbacks run here.

    Requests are repeated while the server does not answer; each may arrive twice, and then has no effect the second
    time. A restarted server knows no earlier requests, except what the stored state of its job contains.

    Attributes:
        connection: Connection to the job's server.
        job_id: The job.
        session: Session of this client, the only one whose callbacks the job waits for.
        manifest: Its program; None: one whose states are fetched as a whole.
        name: Name by which a later script finds the job; "": none.
        replayed: Cursor of the last event that is older than this client; 0: there is none.
    """

    connection: JobsClient
    job_id: str
    session: str = ""
    name: str = ""
    replayed: int = 0
    manifest: Manifest | None = None

    def events(self) -> Iterator[Event]:
        """Yield all events of the job until its end.

        Raises:
            JobTaken: another client is attached to the job.
        """
        return self.connection.watch(self.job_id, session=self.session)

    def proceed(self, epoch: int, until: int | None = None) -> None:
        """Start or resume this epoch; it pauses after ``until`` of its steps (None: at no step) and at its end."""
        self._control(proceed=pb.Proceed(epoch=epoch, until=until or 0))

    def stop_training(self) -> None:
        """Finish the job now; it succeeds."""
        self._control(stop_training=pb.StopTraining())

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate from the next update on."""
        self._control(set_learning_rate=pb.SetLearningRate(value=value))

    def set_state(self, parts: Sequence[bytes | memoryview]) -> None:
        """Continue from the state in an artifact, given in parts; only while training is paused.

        Optimizer and untrained variables that it lacks are unchanged.
        """
        blob = Blob(*parts)
        upload(self.connection, {blob.sha256: blob})
        self._control(set_weights=pb.SetWeights(artifact=blob.sha256))

    def snapshot(self, epochs: int = 0, steps: int = 0, contents: Contents = "everything") -> State:
        """Return the state at the end of the epoch; within an epoch, the current state of every shard.

        Args:
            contents: What it has at least.
            epochs: Number of epochs that ended before the state that the caller needs.
            steps: Number of finished steps of the epoch after them.

        Raises:
            StateLost: the server's state is an earlier one.
        """
        reply = self.connection.persist(lambda: self.connection.snapshot(self.job_id, contents))
        if (reply.epochs, reply.steps) < (epochs, steps):
            raise StateLost(f"Job {self.job_id}: the state after {epochs} epochs and {steps} steps is lost.")
        state = self.fetch(reply.artifact) if reply.artifact else State(NO_WEIGHTS)
        return replace(state, metrics=state.metrics or reply.metrics)

    def fetch(self, artifact: str) -> State:
        """Return the state in an artifact; see :func:`fetch_state`."""
        return fetch_state(self.connection, artifact, self.manifest)

    def result_artifact(self) -> str:
        """Return the name of the result artifact of a job that has succeeded."""
        return str(self._show().result_artifact)

    def worker_statistics(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the workers' totals so far, as in ``history.nfdt``."""
        return dict(json.loads(self._show().workers_json or "{}"))

    def validated(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Store the numbers of a validation in this process, for a script that attaches to the job later.

        Numbers that are too long to store are left out; such a script then validates again.
        """
        text = json.dumps(logs, default=lambda value: np.asarray(value).tolist()) if self.name else ""
        if 0 < len(text) <= MAX_LOGS_BYTES:
            self._control(validated=pb.Validated(epoch=epoch, logs_json=text))

    def _show(self) -> pb.JobDescription:
        return self.connection.persist(lambda: self.connection.show(self.job_id))

    def _control(self, **action: Any) -> None:
        self.connection.persist(lambda: self.connection.control(self.job_id, **action))

    def leave(self, last_epoch: int) -> bool:
        """Let a job with a name train its remaining epochs without callbacks; return whether it does."""
        if not self.name:
            return False
        try:
            proceed = pb.Proceed(epoch=last_epoch)
            self.connection.control(self.job_id, CANCEL_TIMEOUT_S, proceed=proceed)
        except NfdtError as error:
            logger.info("Job %s could not be left: %s", self.job_id, error)
            return False
        logger.warning("Job %s goes on without this script; run it again with --job %s.", self.job_id, self.name)
        return True

    def cancel(self, reason: str) -> None:
        """Cancel the job; never raises, because the server may be gone."""
        try:
            self.connection.control(self.job_id, CANCEL_TIMEOUT_S, cancel=pb.Cancel(reason=reason))
        except NfdtError as error:
            logger.info("Job %s could not be cancelled: %s", self.job_id, error)


def start_line(
    job_id: str,
    spec: JobSpec,
    server: pb.ServerDescription,
    link: str,
    arguments: Iterable[str] = (),
    *,
    warm: bool = False,
) -> str:
    """Return the line that announces a job: algorithm, workers with devices, and what can be opened on this machine.

    Args:
        job_id: The job.
        spec: Its specification.
        server: Its server.
        link: Link to its page; "" without a page.
        arguments: Arguments with which a command reaches the server.
        warm: Whether the machine's warm server has started it.
    """
    workers, of_warm = spec.cluster.workers, " of the warm server" if warm else ""
    parts = [f"job {job_id}", f"{spec.algorithm.name} on {workers} worker{'s' if workers != 1 else ''}{of_warm}"]
    if (devices := spec.cluster.devices_per_worker) is not None:
        some = {1: "1 device", "all": "all its devices"}.get(devices, f"{devices} devices")
        parts.append(f"each with {some}")
    if server.state_dir and (logs := Path(server.state_dir, "logs")).is_dir():  # else it is on another machine
        parts.append(f"logs in {logs}")
    parts.append(f"page {link}" if link else f"look at it with `{' '.join(['nfdt top', *arguments])}`")
    return f"nfdt: {', '.join(parts)}"
