"""Requests of the clients of one job: actions, snapshots, new weights; and the batches that they feed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobCancelled, JobFailed, ServerUnreachable, UsageError
from nfdt.core.events import MAX_LOGS_BYTES
from nfdt.core.jobs.feed import StreamedBatch
from nfdt.core.wire import jobs_pb2
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.jobserver.job_core import ActiveTraining, JobCore

WEIGHTS, METRICS = jobs_pb2.SnapshotRequest.WEIGHTS, jobs_pb2.SnapshotRequest.METRICS
FULL_S = 60.0  # limit of the wait for room for a batch
POLL_S = 0.5


class ClientRequests:
    """Handler of client requests, each on its own thread.

    Args:
        core: Core of the job.
    """

    def __init__(self, core: JobCore) -> None:
        self._core, self._mailbox = core, core.mailbox

    def watching(self, change: int, session: str) -> None:
        """Add ``change`` to the number of clients that watch the job; see :meth:`ClientControl.watch`."""
        now = self._core.server.clock.now()
        self._mailbox.handle(lambda: self._core.control.watch(change, now, session))

    def check_free(self, session: str) -> None:
        """Raise JobTaken if the client of another session is attached to the job."""
        self._mailbox.read(lambda: self._core.control.check_free(session))

    def control(self, request: jobs_pb2.ControlRequest) -> None:
        """Execute an action of a client.

        Raises:
            UsageError: The action is not possible now.
        """
        training = self._mailbox.handle(lambda: self._apply(request))
        if request.HasField("set_learning_rate") and training is not None:
            self._core.set_learning_rate(training, request.set_learning_rate.value)
        if request.HasField("set_weights"):
            self._set_weights(request.set_weights.artifact)

    def _apply(self, request: jobs_pb2.ControlRequest) -> ActiveTraining | None:
        control = self._core.control
        match request.WhichOneof("action"):
            case "cancel":
                self._mailbox.end(JobCancelled(request.cancel.reason or "somebody cancelled it"))
            case "proceed":
                control.permit(request.proceed.epoch, request.proceed.until or None)
            case "stop_training":
                control.stop_training = True
            case "validated":
                self._core.job_log.record("validated", _validated(request.validated))
            case "set_learning_rate":
                control.set_learning_rate(request.set_learning_rate.value)
        return None if self._core.ended else self._core.training

    def _set_weights(self, artifact: str) -> None:
        def keep() -> bool:
            if waits := self._waits_for_shards:
                self._core.control.weights = artifact
            return waits

        if not self._mailbox.handle(keep):
            with self._reading("weights can be set", standing=True) as training:
                self._core.replace(training, artifact)

    @property
    def _waits_for_shards(self) -> bool:
        return self._core.training is None and not self._core.ended

    def snapshot(self, contents: jobs_pb2.SnapshotRequest.Contents.ValueType) -> jobs_pb2.SnapshotReply:
        """Return the state, or a part of it.

        It is the initial one before training, and between epochs that of the last epoch's end. In an epoch, return
        the current state of the shards.

        Raises:
            ServerUnreachable: The job has ended, or is about to run again.
            NotStored: The disk is full; if training stands still, it was for too long.
        """
        core = self._core
        if self._mailbox.read(lambda: self._waits_for_shards):
            return jobs_pb2.SnapshotReply(artifact=core.manifest.state, epochs=core.spec.fit.initial_epoch)
        with self._reading("a snapshot can be taken", standing=False) as training:
            coordinator = training.coordinator
            passing, standing, epochs, steps, present = self._mailbox.read(
                lambda: (
                    not training.between_epochs,
                    training.standing,
                    coordinator.epochs_ended,
                    coordinator.steps_finished,
                    training.present_state,
                )
            )
            if contents == METRICS:
                return jobs_pb2.SnapshotReply(epochs=epochs, steps=steps, metrics=coordinator.merger.metrics)
            if present and core.server.embedded:  # the client reads the file where it is, whatever else it has
                metrics = coordinator.merger.metrics
                return jobs_pb2.SnapshotReply(artifact=present, epochs=epochs, steps=steps, metrics=metrics)
            moment = object() if passing else epochs
            compose = partial(training.composer.compose, moment, weights_only=contents == WEIGHTS)
            artifact = self._core.store(compose) if standing else compose()
        if passing:
            self._core.job_log.passing(artifact)
        return jobs_pb2.SnapshotReply(artifact=artifact, epochs=epochs, steps=steps)

    @contextmanager
    def _reading(self, what: str, *, standing: bool) -> Iterator[ActiveTraining]:
        """Prevent epochs from beginning inside the block; ``standing``: require that none is running either."""
        core = self._core

        def begin() -> ActiveTraining:
            if core.ended:
                raise ServerUnreachable(f"Job {core.job_id} has ended, or is about to run again.")
            training = core.training
            if training is None or (standing and not training.standing):
                phase = training.coordinator.phase if training is not None else "start"
                when = "between two epochs, or while one stands still" if standing else "once it trains"
                raise UsageError(f"Job {core.job_id}: {what} {when}. Received: in phase {phase}.")
            core.readers += 1
            return training

        def end() -> None:
            core.readers -= 1

        training = self._mailbox.handle(begin)
        try:
            yield training
        finally:
            self._mailbox.handle(end)


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


class ClientFeed:
    """Entry for the batches of clients; a :class:`~nfdt.core.jobs.feed.BatchFeed`. Any thread may call.

    The coordinator queues the batches and counts the credit. A client that connects again replaces the one before.

    Args:
        core: Core of the job.
    """

    def __init__(self, core: JobCore) -> None:
        self._core, self._mailbox = core, core.mailbox
        self._client = 0  # number of the newest client
        self._epoch = -1
        self._announced = 0  # credits of the epoch that clients have been sent
        self._accepted = 0  # batches of the epoch that the job had when its client began

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        return self._mailbox.read(lambda: self._core.ended)

    def await_room(self, client: int, epoch: int, size: int) -> None:
        """Wait until there is room for a batch of ``size`` bytes, or nobody needs it any more.

        After ``FULL_S`` the batch is accepted without room: no snapshot of the shards may be possible, and without a
        batch training would stand still.
        """

        def has_room() -> bool | None:
            if client != self._client or (coordinator := self._active) is None:
                return True
            return coordinator.has_room(epoch, size) or None

        if not self._mailbox.read(has_room):
            # A snapshot may make room. Any message lets the job's thread see that one is due.
            self._mailbox.handle(lambda: None)
            self._mailbox.wait(has_room, FULL_S, poll_s=POLL_S)

    def offer(self, client: int, batch: StreamedBatch) -> None:
        """Accept a batch of the newest client; drop one of another client or of an epoch that is over.

        Raises:
            ProtocolError: The client had no credit for it.
        """

        def accept() -> None:
            if client == self._client and (coordinator := self._active) is not None:
                coordinator.fed(batch.epoch, batch.data, batch.samples)

        self._mailbox.handle(accept)

    def end(self, epoch: int, error: str | None = None) -> None:
        """Record that the client's iterator has no more batches for this epoch, or raised."""

        def close() -> None:
            if error is not None:
                self._mailbox.end(JobFailed(f"The script's data iterator failed: {error}"))
            elif (coordinator := self._active) is not None:
                coordinator.feed_ended(epoch)

        self._mailbox.handle(close)

    def open(self) -> int:
        """Register a client and return its number; it is announced all credits that are still unused."""

        def begin() -> int:
            self._epoch = -1
            self._client += 1
            return self._client

        return self._mailbox.handle(begin)

    def grant(self, timeout_s: float) -> pb.FeedCredit | None:
        """Return new credits for the client; None when the job is over, or after ``timeout_s`` without any."""

        def announce() -> pb.FeedCredit | bool | None:
            if not (new := self._unannounced()):
                return self._core.ended or None
            self._announced += new
            return pb.FeedCredit(epoch=self._epoch, batches=new, accepted=self._accepted)

        credit = self._mailbox.wait(announce, timeout_s)
        return credit if isinstance(credit, pb.FeedCredit) else None

    @property
    def _active(self) -> Coordinator | None:
        training = None if self._core.ended else self._core.training
        return None if training is None else training.coordinator

    def _unannounced(self) -> int:
        if (coordinator := self._active) is None:
            return 0
        credit = coordinator.feed_credit
        if credit.epoch != self._epoch:
            self._epoch = credit.epoch
            self._announced = self._accepted = credit.total - credit.free
        return max(0, credit.total - self._announced)
