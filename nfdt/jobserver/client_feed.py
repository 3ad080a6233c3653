"""Batches of a client on their way into the coordinator, which alone queues them and counts the credit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.jobs.feed import StreamedBatch
from nfdt.core.wire import jobs_pb2 as pb

FULL_S = 60.0
POLL_S = 0.5


class ClientFeed:
    """A :class:`~nfdt.core.jobs.feed.BatchFeed`; any thread may call.

    Args:
        changed: Condition of the job.
        coordinator: Returns the coordinator of the job; None before the job trains.
        has_ended: Returns whether the job is over; called under ``changed``.
        fail: Ends the job with an error; called under ``changed``.
    """

    def __init__(
        self,
        changed: threading.Condition,
        coordinator: Callable[[], Coordinator | None],
        has_ended: Callable[[], bool],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._changed, self._coordinator, self._has_ended, self._fail = changed, coordinator, has_ended, fail
        self._client = 0  # number of the newest client
        self._epoch = -1
        self._announced = 0  # credits of the epoch that clients have been sent
        self._accepted = 0  # batches of the epoch that the job had when its client began

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        with self._changed:
            return self._has_ended()

    def await_room(self, client: int, epoch: int, size: int) -> None:
        """Wait until there is room for a batch of so many bytes, or no need for it.

        If no room is made in ``FULL_S``, as where no snapshot of the shards can be stored, the batch is taken all the
        same.
        """
        deadline = time.monotonic() + FULL_S
        with self._changed:
            while client == self._client and (coordinator := self._active()) is not None:
                left_s = deadline - time.monotonic()
                if coordinator.has_room(epoch, size) or left_s <= 0:
                    return
                self._changed.notify_all()  # a snapshot makes room
                self._changed.wait(min(left_s, POLL_S))

    def offer(self, client: int, batch: StreamedBatch) -> None:
        """Accept a batch of the newest client; drop one of another client or of an epoch that is over.

        Raises:
            ProtocolError: The client had no credit for it.
        """
        with self._changed:
            if client == self._client and (coordinator := self._active()) is not None:
                coordinator.fed(batch.epoch, batch.data, batch.samples)
                self._changed.notify_all()

    def end(self, epoch: int, error: str | None = None) -> None:
        """Record that the client's iterator has no more batches for this epoch, or raised."""
        with self._changed:
            if error is not None:
                self._fail(JobFailed(f"The script's data iterator failed: {error}"))
            elif (coordinator := self._active()) is not None:
                coordinator.feed_ended(epoch)
            self._changed.notify_all()

    def open(self) -> int:
        """Begin with a client, and return its number: announce all credits that the batches so far have not used."""
        with self._changed:
            self._epoch = -1
            self._client += 1
            return self._client

    def grant(self, timeout_s: float) -> pb.FeedCredit | None:
        """Return new credits to announce; None when the job is over or after ``timeout_s`` without any."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                if new := self._unannounced():
                    self._announced += new
                    return pb.FeedCredit(epoch=self._epoch, batches=new, accepted=self._accepted)
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._has_ended():
                    return None
                self._changed.wait(left_s)

    def _active(self) -> Coordinator | None:
        return None if self._has_ended() else self._coordinator()

    def _unannounced(self) -> int:
        if (coordinator := self._active()) is None:
            return 0
        credit = coordinator.feed_credit
        if credit.epoch != self._epoch:
            self._epoch = credit.epoch
            self._announced = self._accepted = credit.total - credit.free
        return max(0, credit.total - self._announced)
