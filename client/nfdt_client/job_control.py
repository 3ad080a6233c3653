"""Control of a job by its fit: which epoch may begin, what callbacks changed, the end of the training, the batches."""

from __future__ import annotations

from collections.abc import Callable

from nfdt.model.program.state import Contents, State
from nfdt_client.feed import Feeder
from nfdt_client.job import InteractiveJob
from nfdt_client.model_state import ModelState


class JobControl:
    """Requests that hold until others replace them; each run of the job gets those that hold.

    Args:
        job: The job, submitted.
        state: Access to the state of the fit's model.
        feed: Makes the feeder of a job whose batches come from this process, one for each run.
        first_epoch: First epoch of the fit.
        contents: What callbacks may change of the initial state; None: nothing.

    Attributes:
        stopping: Whether the training is to end now.
        muted: Whether requests are only recorded, until :meth:`unmute`: their epochs are over.
    """

    def __init__(
        self,
        job: InteractiveJob,
        state: ModelState,
        feed: Callable[[], Feeder] | None,
        first_epoch: int,
        *,
        contents: Contents | None,
    ) -> None:
        self.stopping, self.muted = False, job.replayed > 0
        self._job, self._state, self._feed = job, state, feed
        self._shown = contents  # what the model has of the cluster's present state
        self._rate, self._local_rates = state.learning_rate, state.local_learning_rates
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

    def load(self, state: State) -> None:
        """Load a state of the cluster into the model, except the learning rate, which the client decides."""
        self._state.forget_known()  # else the values of before would be kept beside the new ones
        self._state.write(state, keep_learning_rate=True)

    def refresh(self, contents: Contents | None, epochs: int = 0, steps: int = 0) -> None:
        """Load what callbacks may read of the cluster's state (None: nothing), and its metrics.

        See :meth:`InteractiveJob.snapshot`.

        Raises:
            StateLost: the server's state is an earlier one.
        """
        state = self._job.snapshot(epochs, steps, contents or "metrics")
        self._shown = contents
        if contents is None:
            self._state.show_metrics(state.metrics)
        else:
            self.load(state)

    def remember_state(self) -> None:
        """Record that the cluster has the state of the model, where callbacks may change it."""
        if self._shown is not None:
            self._state.mark_known()

    def send_changes(self) -> None:
        """Send the changes that callbacks made to the model since the state that both have had."""
        if not self.muted:
            if self._shown is None:
                self.send_outside()
            else:
                state, rates = self._state, self._state.local_learning_rates
                groups = state.changed_groups()
                if state.outside.changed() or rates != self._local_rates:
                    groups.add("untrained")
                if groups:
                    self._job.set_state(state.dump(groups))
                    state.outside.mark_sent()
                    state.mark_known()
                self._local_rates = rates
        self.send_learning_rate()

    def send_outside(self) -> None:
        """Send changes outside the model, with the weights of the cluster, which the model here need not have."""
        outside = self._state.outside
        if outside.changed():
            self.load(self._job.snapshot(contents="weights"))
        if outside.changed():
            self._job.set_state(self._state.dump({"untrained"}))
            outside.mark_sent()

    def send_learning_rate(self) -> None:
        """Send the learning rate if a callback has set another one; it counts from the next update on."""
        rate = self._state.learning_rate
        if rate is not None and rate != self._rate and not self.muted:
            self._job.set_learning_rate(rate)
        self._rate = rate

    def stop(self) -> None:
        """End the training now; the job succeeds."""
        if not self.stopping:
            self.stopping = True
            if not self.muted:
                self._job.stop_training()

    def unmute(self) -> None:
        """Send the requests that hold, the learning rate among them; from now on each is sent at once."""
        self.muted = False
        self._send_again(self.stopping)

    def run_again(self, epoch: int) -> None:
        """Send the requests that hold to the next run of the job, which goes on with this epoch."""
        self.stopping = False
        if self.muted:
            return
        if self._feeder is not None:
            self._feeder.close()
            self._fed_again = epoch  # the new run accepts a feed only when it starts: see `started`
        self._send_again(epoch > self._epoch)  # an epoch before the last one was the end of the training

    def started(self) -> None:
        """Open a feed for the job's new run, which accepts one now, if the feed of its run before has ended."""
        if self._feed is not None and self._fed_again is not None:
            epoch, self._fed_again = self._fed_again, None
            self._feeder = self._feed()
            self._feeder.start_epoch(epoch, again=epoch <= self._fed)
            self._fed = epoch

    def trained_again(self, epoch: int) -> None:
        """Go on with the feed after an epoch that the next run of the job has trained again."""
        self._feed_epoch(epoch + 1)

    def close(self) -> None:
        """End the feed."""
        if self._feeder is not None:
            self._feeder.close()

    def _send_again(self, stop: bool) -> None:
        self._rate = self._state.learning_rate
        if self._rate is not None:
            self._job.set_learning_rate(self._rate)
        if stop:
            self.stopping = True
            self._job.stop_training()
        elif self._fed_again is None:
            self.permit(self._epoch, self._until)
        else:
            self._job.proceed(self._epoch, self._until)

    def _feed_epoch(self, epoch: int) -> None:
        if self._feeder is not None and epoch > self._fed:
            self._feeder.start_epoch(epoch)
            self._fed = epoch
