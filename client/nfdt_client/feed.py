"""Feeds batches that only the client can make, as fast as the job's credits allow."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from nfdt.core.errors import CaptureError
from nfdt.core.jobs.feed import MAX_BATCH_BYTES, StreamedBatch, pieces
from nfdt.core.wire import jobs_pb2 as pb
from nfdt.core.wire.status import translate
from nfdt.model.training.data import encode_batch
from nfdt.model.training.host_batches import rows_of
from nfdt_client.job import InteractiveJob

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
UNSENT_BYTES = 64 * 2**20  # of batches that are read ahead of the server


class Feeder:
    """Runs the user's iterator in a thread of its own and sends one batch for each credit of the server.

    Args:
        job: The job to feed.
        epoch: Yields the batches of the next epoch; called once per epoch, in the feeder's thread.
        rewind: Called in that thread before an epoch that an earlier feeder has begun; raises if its batches cannot be
            read again.

    Attributes:
        error: Exception of the user's iterator or of a broken stream; None without an error.
    """

    def __init__(
        self, job: InteractiveJob, epoch: Callable[[], Iterator[Any]], rewind: Callable[[], None] = lambda: None
    ) -> None:
        self.error: Exception | None = None
        self._job, self._epoch, self._rewind = job, epoch, rewind
        self._epochs: queue.SimpleQueue[tuple[int, bool] | None] = queue.SimpleQueue()  # and whether it is fed again
        self._unsent: queue.SimpleQueue[StreamedBatch | pb.FedBatch | None] = queue.SimpleQueue()
        self._unsent_bytes = 0
        self._changed = threading.Condition()
        self._credits: dict[int, int] = {}
        self._passed: dict[int, int] = {}  # batches of an epoch that the job had before this feed
        self._current: int | None = None
        self._closed = False
        self._call = job.connection.stub.Feed(self._messages())
        self._threads = [
            threading.Thread(target=self._listen, name="feed-credits", daemon=True),
            threading.Thread(target=self._work, name="feed", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def start_epoch(self, epoch: int, *, again: bool = False) -> None:
        """Feed this epoch, as soon as the server grants credits for it; ``again``: from its beginning once more."""
        with self._changed:
            self._current = epoch
            self._changed.notify_all()
        self._epochs.put((epoch, again))

    def close(self) -> None:
        """Stop feeding; the user's iterator keeps its position."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._epochs.put(None)
        self._unsent.put(None)
        self._call.cancel()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def _listen(self) -> None:
        try:
            for credit in self._call:
                with self._changed:
                    self._passed.setdefault(credit.epoch, credit.accepted)
                    self._credits[credit.epoch] = self._credits.get(credit.epoch, 0) + credit.batches
                    self._changed.notify_all()
        except grpc.RpcError as error:
            alone = not self._closed and self._job.connection.answers()  # else the server is gone, not this stream
            if alone and not self._closed:
                self._fail(translate(error, self._job.connection.address))

    def _work(self) -> None:
        while (item := self._epochs.get()) is not None:
            epoch, again = item
            try:
                if again:
                    self._rewind()
                self._feed(epoch)
            except Exception as error:  # any exception of the user's code ends the job
                self.error = error  # set before the job fails from it: handlers of that failure read it
                self._unsent.put(pb.FedBatch(epoch=epoch, error=f"{type(error).__name__}: {error}"))
                return

    def _feed(self, epoch: int) -> None:
        batches = self._epoch()
        step = 0
        while self._spend_credit(epoch):
            if step == 0:  # batches that the job had before it lost the stream are not trained twice
                for _ in range(self._passed.pop(epoch, 0)):
                    next(batches, None)
            batch = next(batches, None)
            if batch is None:
                self._unsent.put(pb.FedBatch(epoch=epoch, step=step, end_of_epoch=True))
                return
            encoded = StreamedBatch(epoch, step, rows_of(batch), encode_batch(batch))
            _check_size(encoded)
            with self._changed:
                self._unsent_bytes += len(encoded.data)
            self._unsent.put(encoded)
            step += 1

    def _messages(self) -> Iterator[pb.FedBatch]:
        """Yield what the server reads; it stops reading where it has no room."""
        yield pb.FedBatch(job_id=self._job.job_id)
        while (item := self._unsent.get()) is not None:
            if isinstance(item, pb.FedBatch):
                yield item
                continue
            yield from pieces(item)
            with self._changed:
                self._unsent_bytes -= len(item.data)
                self._changed.notify_all()

    def _spend_credit(self, epoch: int) -> bool:
        """Wait for room for one batch; False when the epoch is over or the feed is closed."""

        def is_free() -> bool:
            return self._credits.get(epoch, 0) > 0 and self._unsent_bytes < UNSENT_BYTES

        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._current != epoch or is_free())
            if self._closed or self._current != epoch:
                return False
            self._credits[epoch] -= 1
            return True

    def _fail(self, error: Exception) -> None:
        self.error = error
        logger.info("The feed of job %s broke: %s", self._job.job_id, error)
        self._job.cancel(f"the stream of training data broke: {error}")


def _check_size(batch: StreamedBatch) -> None:
    if len(batch.data) > MAX_BATCH_BYTES:
        raise CaptureError(
            f"Batch {batch.step} of the training data: expected at most {MAX_BATCH_BYTES} bytes. "
            f"Received: {len(batch.data)} bytes in {batch.samples} samples. Use smaller batches."
        )
