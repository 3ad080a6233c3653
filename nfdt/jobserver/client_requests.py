"""Requests of the clients of one job: actions, snapshots, new weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nfdt.core.errors import JobCancelled, UsageError
from nfdt.core.wire import jobs_pb2
from nfdt.jobserver.job_context import ActiveTraining, JobContext


class ClientRequests:
    """Handler of client requests, each on its own thread.

    Args:
        context: Parts of the job.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def watching(self, change: int) -> None:
        """Add ``change`` to the number of clients that watch the job."""
        with self._context.changed:
            self._context.control.watch(change, self._context.clock.now())

    def control(self, request: jobs_pb2.ControlRequest) -> None:
        """Execute an action of a client.

        Raises:
            UsageError: The action is not possible now.
        """
        context = self._context
        with context.changed:
            self._note(request)
            context.changed.notify_all()
            training = None if context.ended else context.training
        if request.HasField("set_learning_rate") and training is not None:
            context.set_learning_rate(training, request.set_learning_rate.value)
        if request.HasField("set_weights"):
            self._set_weights(request.set_weights.artifact)

    def _note(self, request: jobs_pb2.ControlRequest) -> None:
        control = self._context.control
        match request.WhichOneof("action"):
            case "cancel":
                self._context.termination.end(JobCancelled(request.cancel.reason or "somebody cancelled it"))
            case "proceed":
                control.permit(request.proceed.epoch, request.proceed.until or None)
            case "stop_training":
                control.stop_training = True
            case "set_learning_rate":
                control.set_learning_rate(request.set_learning_rate.value)

    def _set_weights(self, artifact: str) -> None:
        with self._reading("weights can be set", standing=True) as training:
            training.composer.replace(artifact)
            with self._context.changed:
                training.coordinator.replaced()

    def snapshot(self) -> str:
        """Return the artifact of the state: between epochs that of the last epoch's end, else the shards' current one.

        Raises:
            UsageError: The job does not train yet, or has ended.
        """
        context = self._context
        with context.changed:
            passing = not self._is_between_epochs()
            moment = object() if passing else context.epochs_ended
        with self._reading("a snapshot can be taken", standing=False) as training:
            artifact = training.composer.compose(moment)
        if passing:
            context.job_log.passing(artifact)
        return artifact

    def _is_between_epochs(self) -> bool:
        training = self._context.training
        return training is not None and training.coordinator.phase in ("hold", "ended")

    def _is_standing(self, training: ActiveTraining) -> bool:
        return self._is_between_epochs() or training.coordinator.standing

    @contextmanager
    def _reading(self, what: str, *, standing: bool) -> Iterator[ActiveTraining]:
        """Prevent epochs from beginning inside the block; ``standing``: require that none is running either."""
        context = self._context
        with context.changed:
            training = context.training
            if training is None or context.ended or (standing and not self._is_standing(training)):
                phase = training.coordinator.phase if training is not None else "start"
                when = "between two epochs, or while one stands still" if standing else "once it trains"
                raise UsageError(f"Job {context.job_id}: {what} {when}. Received: in phase {phase}.")
            context.readers += 1
        try:
            yield training
        finally:
            with context.changed:
                context.readers -= 1
                context.changed.notify_all()
