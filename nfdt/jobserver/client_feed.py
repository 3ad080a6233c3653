"""Batches of a client on their way into the coordinator, which alone queues them and counts the credit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobFailed
from nfdt.core.jobs.feed import StreamedBatch
from nfdt.core.wire import jobs_pb2 as pb


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
        self._epoch = -1
        self._announced = 0  # credits of the epoch that clients have been sent
        self._accepted = 0  # batches of the epoch that the job had when its client began

    @property
    def closed(self) -> bool:
        """Whether the job has ended."""
        with self._changed:
            return self._has_ended()

    def offer(self, batch: StreamedBatch) -> None:
        """Accept a batch of the client; drop one of an epoch that is over.

        Raises:
            ProtocolError: The client had no credit for it.
        """
        with self._changed:
            if (coordinator := self._active()) is not None:
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

    def open(self) -> None:
        """Begin with a client: announce all credits of the epoch that the batches so far have not used."""
        with self._changed:
            self._epoch = -1

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
