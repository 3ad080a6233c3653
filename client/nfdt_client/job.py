"""A submitted job and the control messages that its script may send."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from nfdt.core.errors import NfdtError
from nfdt.core.events import Event
from nfdt.core.program.state import State, load_state
from nfdt.core.wire import jobs_pb2 as pb
from nfdt_client.connection import JobsClient
from nfdt_client.model_state import encode
from nfdt_client.upload import Blob, download, upload

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 5.0


class InteractiveJob:
    """The client's side of a job whose callbacks run here.

    Args:
        connection: Connection to the job's server.
        job_id: The job.
    """

    def __init__(self, connection: JobsClient, job_id: str) -> None:
        self.connection, self.job_id = connection, job_id

    def events(self) -> Iterator[Event]:
        """Yield all events of the job until its end."""
        return self.connection.watch(self.job_id)

    def proceed(self, epoch: int, until: int | None = None) -> None:
        """Start or resume this epoch; it pauses after ``until`` of its steps (None: at no step) and at its end."""
        self.connection.control(self.job_id, proceed=pb.Proceed(epoch=epoch, until=until or 0))

    def stop_training(self) -> None:
        """Finish the job now; it succeeds."""
        self.connection.control(self.job_id, stop_training=pb.StopTraining())

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate from the next update on."""
        self.connection.control(self.job_id, set_learning_rate=pb.SetLearningRate(value=value))

    def set_state(self, state: State) -> None:
        """Continue from other weights, optimizer and untrained variables; only while training is paused."""
        blob = Blob(encode(state))
        upload(self.connection, {blob.sha256: blob})
        self.connection.control(self.job_id, set_weights=pb.SetWeights(artifact=blob.sha256))

    def snapshot(self) -> State:
        """Return the state at the end of the epoch; within an epoch, the current state of every shard."""
        return self.fetch(self.connection.snapshot(self.job_id))

    def fetch(self, artifact: str) -> State:
        """Download a state artifact."""
        return load_state(download(self.connection, artifact))

    def result_artifact(self) -> str:
        """Return the name of the result artifact of a job that has succeeded."""
        return str(self.connection.show(self.job_id).result_artifact)

    def cancel(self, reason: str) -> None:
        """Cancel the job; never raises, because the server may be gone."""
        try:
            self.connection.control(self.job_id, CANCEL_TIMEOUT_S, cancel=pb.Cancel(reason=reason))
        except NfdtError as error:
            logger.info("Job %s could not be cancelled: %s", self.job_id, error)
