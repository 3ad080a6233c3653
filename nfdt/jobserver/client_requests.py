"""Requests of the clients of one job: actions, snapshots, new weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nfdt.core.errors import JobCancelled, ServerUnreachable, UsageError
from nfdt.core.events import MAX_LOGS_BYTES
from nfdt.core.wire import jobs_pb2
from nfdt.jobserver.job_context import ActiveTraining, JobContext


class ClientRequests:
    """Handler of client requests, each on its own thread.

    Args:
        context: Parts of the job.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def watching(self, change: int, session: str) -> None:
        """Add ``change`` to the number of clients that watch the job; see :meth:`ClientControl.watch`."""
        with self._context.changed:
            self._context.control.watch(change, self._context.clock.now(), session)

    def check_free(self, session: str) -> None:
        """Raise JobTaken if the client of another session is attached to the job."""
        with self._context.changed:
            self._context.control.check_free(session)

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
            case "validated":
                self._context.job_log.record("validated", _validated(request.validated))
            case "set_learning_rate":
                control.set_learning_rate(request.set_learning_rate.value)

    def _set_weights(self, artifact: str) -> None:
        with self._context.changed:
            if self._context.training is None and not self._context.ended:
                self._context.control.weights = artifact
                return
        with self._reading("weights can be set", standing=True) as training:
            self._context.replace_state(training, artifact)

    def snapshot(self) -> jobs_pb2.SnapshotReply:
        """Return the state: the initial one before training, between epochs that of the last epoch's end.

        In an epoch, return the current state of the shards.

        Raises:
            ServerUnreachable: The job has ended, or is about to run again.
            NotStored: The disk is full; if training stands still, it was for too long.
        """
        context = self._context
        with context.changed:
            if context.training is None and not context.ended:
                return jobs_pb2.SnapshotReply(artifact=context.manifest.state, epochs=context.spec.fit.initial_epoch)
        with self._reading("a snapshot can be taken", standing=False) as training:
            with context.changed:
                passing, epochs = not training.between_epochs, training.coordinator.epochs_ended
                steps, standing = training.coordinator.steps_finished, self._is_standing(training)
            moment = object() if passing else epochs
            artifact = context.store_state(training, moment) if standing else training.composer.compose(moment)
        if passing:
            context.job_log.passing(artifact)
        return jobs_pb2.SnapshotReply(artifact=artifact, epochs=epochs, steps=steps)

    def _is_standing(self, training: ActiveTraining) -> bool:
        return training.between_epochs or training.coordinator.standing

    @contextmanager
    def _reading(self, what: str, *, standing: bool) -> Iterator[ActiveTraining]:
        """Prevent epochs from beginning inside the block; ``standing``: require that none is running either."""
        context = self._context
        with context.changed:
            if context.ended:
                raise ServerUnreachable(f"Job {context.job_id} has ended, or is about to run again.")
            training = context.training
            if training is None or (standing and not self._is_standing(training)):
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


def _validated(message: jobs_pb2.Validated) -> dict[str, Any]:
    """Return the event of a validation by the client.

    Raises:
        UsageError: The numbers are no JSON object, or too long.
    """
    try:
        logs = json.loads(message.logs_json) if len(message.logs_json) <= MAX_LOGS_BYTES else None
    except (ValueError, RecursionError):
        logs = None
    if not isinstance(logs, dict):
        raise UsageError(f"Validation: expected a JSON object of at most {MAX_LOGS_BYTES} bytes. Received another.")
    return {"epoch": message.epoch, "val_logs": logs}
