"""Batches of a client on their way into the coordinator, which alone queues them and counts the credit."""

from __future__ import annotations

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.jobs.feed import StreamedBatch
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.jobserver.job_core import JobCore

FULL_S = 60.0
POLL_S = 0.5


class ClientFeed:
    """A :class:`~nfdt.core.jobs.feed.BatchFeed`; any thread may call.

    Args:
        core: Core of the job.
    """

    def __init__(self, core: JobCore) -> None:
        self._core, self._mailbox = core, core.parts.mailbox
        self._client = 0  # number of the newest client
        self._epoch = -1
        self._announced = 0  # credits of the epoch that clients have been sent
        self._accepted = 0  # batches of the epoch that the job had when its client began

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        return self._mailbox.read(lambda: self._core.ended)

    def await_room(self, client: int, epoch: int, size: int) -> None:
        """Wait until there is room for a batch of so many bytes, or no need for it.

        If no room is made in ``FULL_S``, as where no snapshot of the shards can be stored, the batch is taken all the
        same.
        """

        def has_room() -> bool | None:
            if client != self._client or (coordinator := self._active) is None:
                return True
            return coordinator.has_room(epoch, size) or None

        if not self._mailbox.read(has_room):
            self._mailbox.handle(lambda: None)  # the job's thread sees that a snapshot would make room
            self._mailbox.wait(has_room, FULL_S, poll_s=POLL_S)

    def offer(self, client: int, batch: StreamedBatch) -> None:
        """Accept a batch of the newest client; drop one of another client or of an epoch that is over.

        Raises:
            ProtocolError: The client had no credit for it.
        """

        def take() -> None:
            if client == self._client and (coordinator := self._active) is not None:
                coordinator.fed(batch.epoch, batch.data, batch.samples)

        self._mailbox.handle(take)

    def end(self, epoch: int, error: str | None = None) -> None:
        """Record that the client's iterator has no more batches for this epoch, or raised."""

        def take() -> None:
            if error is not None:
                self._mailbox.end(JobFailed(f"The script's data iterator failed: {error}"))
            elif (coordinator := self._active) is not None:
                coordinator.feed_ended(epoch)

        self._mailbox.handle(take)

    def open(self) -> int:
        """Begin with a client, and return its number: announce all credits that the batches so far have not used."""

        def begin() -> int:
            self._epoch = -1
            self._client += 1
            return self._client

        return self._mailbox.handle(begin)

    def grant(self, timeout_s: float) -> pb.FeedCredit | None:
        """Return new credits to announce; None when the job is over or after ``timeout_s`` without any."""

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
