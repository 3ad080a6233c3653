"""Requests of a fit to its job: the epoch that may begin, the learning rate, the end of the training, the batches."""

from __future__ import annotations

from collections.abc import Callable

from nfdt_client.feed import Feeder
from nfdt_client.job import InteractiveJob


class Requests:
    """Requests that hold until others replace them; each run of the job gets those that hold.

    Args:
        job: The job, submitted.
        feed: Makes the feeder of a job whose batches come from this process, one for each run.
        first_epoch: First epoch of the fit.
        muted: Whether to record the requests only, until :meth:`unmute`: their epochs are over.

    Attributes:
        stopping: Whether the training is to end now.
        muted: As given, until :meth:`unmute`.
    """

    def __init__(
        self, job: InteractiveJob, feed: Callable[[], Feeder] | None, first_epoch: int, *, muted: bool
    ) -> None:
        self.stopping, self.muted = False, muted
        self._job, self._feed = job, feed
        self._feeder = feed() if feed is not None else None
        self._epoch = first_epoch
        self._until: int | None = None
        self._fed = first_epoch - 1  # last epoch that a feeder has begun
        self._fed_again: int | None = None  # epoch to feed once the job runs again

    @property
    def feeds(self) -> bool:
        """Whether the batches come from this process."""
        return self._feed is not None

    @property
    def feed_error(self) -> Exception | None:
        """Exception that ended the feed, if any."""
        return self._feeder.error if self._feeder is not None else None

    def permit(self, epoch: int, until: int | None) -> None:
        """Start or resume this epoch; it pauses after ``until`` of its steps (None: at no step) and at its end."""
        self._epoch, self._until = epoch, until
        if not self.muted:
            self._feed_epoch(epoch)
            self._job.proceed(epoch, until)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate from the next update on."""
        if not self.muted:
            self._job.set_learning_rate(rate)

    def stop(self) -> None:
        """End the training now; the job succeeds."""
        if not self.stopping:
            self.stopping = True
            if not self.muted:
                self._job.stop_training()

    def unmute(self, rate: float | None) -> None:
        """Send the requests that hold, the learning rate among them; from now on each is sent at once."""
        self.muted = False
        self._send(rate, self.stopping)

    def run_again(self, epoch: int, rate: float | None) -> None:
        """Send the requests that hold to the next run of the job, which goes on with this epoch."""
        self.stopping = False
        if self.muted:
            return
        if self._feeder is not None:
            self._feeder.close()
            self._fed_again = epoch
        self._send(rate, epoch > self._epoch)  # an epoch before the last one was the end of the training

    def started(self) -> None:
        """Open a feed for the job's new run, which takes one now, if the feed of its run before has ended."""
        if self._feed is not None and self._fed_again is not None:
            epoch, self._fed_again = self._fed_again, None
            self._feeder = self._feed()
            self._feeder.begin(epoch, again=epoch <= self._fed)
            self._fed = epoch

    def trained_again(self, epoch: int) -> None:
        """Go on with the feed after an epoch that the next run of the job has trained again."""
        self._feed_epoch(epoch + 1)

    def close(self) -> None:
        """End the feed."""
        if self._feeder is not None:
            self._feeder.close()

    def _send(self, rate: float | None, stop: bool) -> None:
        if rate is not None:
            self._job.set_learning_rate(rate)
        if stop:
            self.stopping = True
            self._job.stop_training()
        elif self._fed_again is None:
            self.permit(self._epoch, self._until)
        else:
            self._job.proceed(self._epoch, self._until)

    def _feed_epoch(self, epoch: int) -> None:
        if self._feeder is not None and epoch > self._fed:
            self._feeder.begin(epoch)
            self._fed = epoch
