"""Replays a job's events to Keras' callbacks in this process, and sends back what callbacks change."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nfdt.core.errors import JobFailed, JobTaken, NotStored, PolicyRefused, Terminated, UsageError
from nfdt.core.events import Event
from nfdt.core.wire.parsing import Seldom
from nfdt.model.keras_internals import data as keras_data
from nfdt.model.keras_internals import training as keras_training
from nfdt.model.program.state import NO_WEIGHTS, Contents, State
from nfdt_client import tables
from nfdt_client.batch_hooks import BatchHooks, Pauses, as_returned
from nfdt_client.board import Board
from nfdt_client.failures import TRAINED, failure_of, stop_reason
from nfdt_client.feed import Feeder
from nfdt_client.fit_record import FitRecord
from nfdt_client.handle import as_logs, describe_stall, epoch_logs
from nfdt_client.job import InteractiveJob, StateLost
from nfdt_client.job_control import JobControl
from nfdt_client.kept_state import back_up
from nfdt_client.model_state import ModelState
from nfdt_client.replay import REPLAYED, without_saving

logger = logging.getLogger(__name__)

Logs = dict[str, Any]
Validation = Callable[[int], Logs | None]
"""Validation in this process after an epoch; returns logs, without prefix, or None in an epoch without validation."""
CHANGE_S = 20.0  # in which one job ends and another one begins, whose workers take local steps
REFRESH_FACTOR = 9.0  # pause between two refreshes, in durations of one


@dataclass(frozen=True)
class Fit:
    """A ``fit`` call that is being run on the cluster.

    Attributes:
        model: The user's model.
        callbacks: Keras' CallbackList; ``on_train_begin`` and the first ``on_epoch_begin`` have been called, so
            that their changes to the model are in the job's program.
        state: Access to the model's state.
        initial_epoch: First epoch to run.
        epochs: Index after the last epoch.
        steps_per_execution: Batches between two calls of the batch hooks.
        steps_per_epoch: Steps of an epoch that the job was asked for, where its data may end before.
        contents: What callbacks may read or change of the state between epochs; None: nothing.
        batch_contents: The same between batches.
        watches_batches: Whether a callback may read the weights between batches without a pause of the training.
        pauses: Plan of the pauses for the batch hooks; None: training never pauses.
        validate: Validation in this process; None if the workers validate or there is no validation.
        validation_steps: Batches of the workers' validation, for the test hooks; 0 when there is none.
        board: Writes the epochs for TensorBoard; None: no files.
        may_change: Whether another job may train the epochs that are left, with local steps.
        log_groups: Names of the dictionaries within the logs of ``train_step`` that hold a log, by its name.
    """

    model: Any
    callbacks: Any
    state: ModelState
    initial_epoch: int
    epochs: int
    steps_per_execution: int = 1
    steps_per_epoch: int | None = None
    contents: Contents | None = "everything"
    batch_contents: Contents | None = "everything"
    watches_batches: bool = False
    pauses: Pauses | None = None
    validate: Validation | None = None
    validation_steps: int = 0
    board: Board | None = None
    may_change: bool = False
    log_groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def begin_epoch(model: Any, callbacks: Any, epoch: int) -> None:
    """Prepare the model for an epoch as Keras does before it trains."""
    model.reset_metrics()
    callbacks.on_epoch_begin(epoch)
    callbacks.on_train_batch_begin(0)


def finalize(model: Any) -> None:
    """Let the model's optimizer, if it has one, finish the variables as Keras does after the last epoch."""
    if model.optimizer is not None:
        model.optimizer.finalize_variable_values(model.trainable_weights)


class Mirror:
    """The client's side of one job, from its first epoch to its end.

    Args:
        fit: The call.
        job: The job, submitted.
        feed: Makes the feeder of a job whose batches come from this process, one for each server.

    Attributes:
        following: After :meth:`run`, the epoch with which another job goes on with local steps; None: the fit is over.
    """

    def __init__(self, fit: Fit, job: InteractiveJob, feed: Callable[[], Feeder] | None = None) -> None:
        self._fit, self._job = fit, job
        self.following: int | None = None
        self._waiting_share = 0.0  # of a step, in which workers wait for slow links
        self._control = JobControl(job, fit.state, feed, fit.initial_epoch, contents=fit.contents)
        self._validated: Mapping[int, Mapping[str, Any]] = {}  # validations of replayed epochs in an earlier script
        self._closed = fit.initial_epoch - 1  # last epoch whose end the callbacks have seen
        self._queued = False
        self._callbacks, self._model = fit.callbacks, fit.model
        self._hooks = BatchHooks(fit.callbacks, fit.model, fit.steps_per_execution, fit.log_groups)
        self._epoch, self._steps = fit.initial_epoch, 0  # of the epoch, 0 if not known beforehand
        self._until: int | None = None  # steps after which training pauses
        self._last: Mapping[str, Any] | None = None  # the final epoch_end, kept until the result has arrived
        self._loaded: Contents | None = None  # what the model has of the state at the end
        self._refresh_at = 0.0
        self._warnings = Seldom(logger)
        self._ended = False
        self._began = False
        self._result: dict[str, Any] = {}
        self._redone_samples = 0
        self._measured: list[dict[str, Any]] = []  # epochs, for the record
        self._logs: Logs | None = None
        self._late: list[str] = []  # values that a hook between batches has changed

    def run(self) -> FitRecord:
        """Mirror the job to its end; the model then holds the result.

        Returns:
            Statistics of each worker.

        Raises:
            Exception: the job failed (see :func:`~nfdt_client.failures.failure_of` for the type), or a callback
                raised; the job is cancelled in the second case.
        """
        try:
            return self._run()
        except BaseException as error:
            if not self._ended and not isinstance(error, JobTaken):
                self._end_early(error)
            if self._began:
                error.add_note(TRAINED)
            if self._control.feed_error is not None and isinstance(error, Exception):
                raise self._control.feed_error from error
            raise
        finally:
            self._control.close()

    def _end_early(self, error: BaseException) -> None:
        """Cancel the job; after a signal, leave it if a later script can find it and it needs no batches from here."""
        if isinstance(error, Terminated):
            back_up(self._fit.state, self._job, self._callbacks, self._epoch)
            if not self._control.feeds and self._job.leave(self._fit.epochs - 1):
                error.code = 0
                return
        self._job.cancel(stop_reason(error))

    def _run(self) -> FitRecord:
        self._control.remember_state()
        self._hooks.begin_epoch()
        self._go_on()
        replayed: list[Event] = []
        for event in self._job.events():
            if event.cursor <= self._job.replayed:
                replayed.append(event)
                if event.cursor < self._job.replayed:
                    continue
            self._replay(replayed)
            if event.cursor > self._job.replayed:
                self._handle(event)
        return self._finish()

    def _replay(self, events: list[Event]) -> None:
        """Call the callbacks for the epochs that were trained before this script attached to the job.

        They see the newest weights, not those of each epoch.
        """
        if not self._control.muted:
            return
        if self._fit.contents is not None:
            self._control.refresh(self._fit.contents)
        self._validated = {e.data["epoch"]: e.data["val_logs"] for e in events if e.kind == "validated"}
        # The server keeps no weights of earlier epochs, and the files of the earlier script have those.
        with without_saving(self._callbacks, self._model):
            for event in events:
                if event.kind in REPLAYED:
                    self._handle(event)
        self._control.remember_state()
        if not self._ended:
            with contextlib.suppress(UsageError):  # the epoch has begun already, with the changes of the earlier script
                self._control.send_outside()
            self._control.unmute()

    def _handle(self, event: Event) -> None:
        handlers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "state": self._on_state,
            "epoch_begin": self._on_epoch_begin,
            "progress": self._on_progress,
            "epoch_end": self._on_epoch_end,
            "result": self._result.update,
            "worker_lost": lambda d: logger.warning("%s is lost: %s", d.get("worker"), d.get("reason")),
            "shard_lost": lambda d: logger.warning("%s is lost: %s", d.get("shard"), d.get("reason")),
            "shards_restored": self._on_shards_restored,
            "stalled": lambda d: logger.warning("%s", describe_stall(d)),
            "slow_links": self._on_slow_links,
            "log": self._on_log,
            "plan": lambda d: print(f"plan: {d.get('reason')}", file=sys.stderr),
        }
        if handler := handlers.get(event.kind):
            try:
                handler(event.data)
            except StateLost as error:  # the event comes again
                logger.info("%s", error)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        begin_epoch(self._model, self._callbacks, epoch)
        self._control.send_changes()
        self._hooks.begin_epoch()
        self._go_on()

    def _go_on(self) -> None:
        self._until = self._fit.pauses(self._hooks.done) if self._fit.pauses is not None else None
        self._control.permit(self._epoch, self._until)

    def _on_state(self, data: Mapping[str, Any]) -> None:
        state = data.get("state")
        self._ended = state in ("succeeded", "failed", "cancelled")
        if state in ("failed", "cancelled"):
            raise failure_of(self._job.job_id, data)
        if state == "queued":
            if self._queued:  # for the second time: by a restarted server, which has none of the requests
                self._control.run_again(int(data.get("epoch", self._epoch)))
            self._queued = True
        elif state == "starting":
            self._control.started()
        logger.info("Job %s is %s", self._job.job_id, state)

    def _on_log(self, data: Mapping[str, Any]) -> None:
        level = logging.getLevelNamesMapping().get(str(data.get("level", "INFO")).upper(), logging.INFO)
        logger.log(level, "%s: %s", data.get("worker") or "server", data.get("text"))

    def _on_epoch_begin(self, data: Mapping[str, Any]) -> None:
        """Set the progress bar to the cluster's number of steps, unless ``fit`` was given one."""
        self._began = True
        params = self._callbacks.params or {}
        steps = data.get("steps")
        self._steps = int(steps or 0) if not self._control.feeds else 0  # a stream may end before its declared length
        if steps and not self._fit.steps_per_epoch and steps != params.get("steps"):
            self._callbacks.set_params({**params, "steps": steps})
            bar = keras_training.progress_bar(self._callbacks)
            if bar is not None:
                bar.target = steps

    def _on_progress(self, data: Mapping[str, Any]) -> None:
        if data.get("epoch", self._epoch) != self._epoch or self._control.stopping:
            return
        steps, logs, more = int(data["steps"]), data.get("logs") or {}, data.get("pause")
        if more is not None and not self._control.muted:
            self._on_pause(steps, logs, more)
            return
        self._refresh()
        # The hook of the step after which training pauses waits for the event of the pause, which has the state.
        self._advance(steps if self._until is None else min(steps, self._until - 1), logs)
        if self._hooks.done < self._steps:  # the next batch is sure to come: a rate set in its hook counts in time
            self._hooks.begin()
        self._control.send_learning_rate()

    def _on_pause(self, steps: int, logs: Logs, more: bool) -> None:
        """Call the hooks while training is paused: callbacks read the state of this step, and changes apply at once."""
        self._control.refresh(self._fit.batch_contents, self._epoch, steps)
        self._control.remember_state()
        self._hooks.advance(steps, as_logs(self._fit.state.metric_logs(logs)), flush=True)
        if more:
            self._hooks.begin()
        self._control.send_changes()
        if self._hooks.stopped:
            self._control.stop()
        else:
            self._go_on()

    def _refresh(self) -> None:
        """Fetch the current weights for callbacks between batches, using at most a tenth of the time."""
        began = time.monotonic()
        if (
            self._fit.watches_batches
            and self._fit.batch_contents is not None
            and not self._control.muted
            and began >= self._refresh_at
        ):
            try:
                self._control.refresh(self._fit.batch_contents)
            except (NotStored, PolicyRefused) as error:  # the disk or the quota is full
                self._warnings.warn("The callbacks between batches see older weights: %s", error)
            now = time.monotonic()
            self._refresh_at = now + REFRESH_FACTOR * (now - began)

    def _advance(self, steps: int, logs: Logs, flush: bool = False) -> None:
        self._hooks.advance(steps, logs, flush=flush)
        if self._hooks.stopped:
            self._control.stop()

    def _on_epoch_end(self, data: Mapping[str, Any]) -> None:
        epoch = data.get("epoch", self._epoch)
        if epoch != self._epoch or epoch <= self._closed:
            self._on_epoch_repeated(epoch)
            return
        logs = as_logs(data.get("logs"))
        self._advance(int(data.get("steps") or self._hooks.done), logs, flush=True)
        self._warn_of_missing_data()
        self._warn_of_late_changes()
        if self._control.stopping or self._epoch + 1 >= self._fit.epochs:
            self._last = data  # callbacks of the last epoch see the job's result, which comes after this event
            return
        left = self._fit.epochs - self._epoch - 1
        changes = self._waiting_share * left * data.get("seconds", 0.0) > CHANGE_S
        contents: Contents | None = "everything" if changes else self._fit.contents
        if contents is not None and not self._control.muted:
            self._control.refresh(contents, self._epoch + 1)
            self._control.remember_state()
        self._close_epoch(data)
        if changes or self._model.stop_training:
            self._loaded = contents
            if not self._model.stop_training:
                self.following = self._epoch + 1
                why = f"exchanges take {self._waiting_share:.0%} of the time"
                print(f"plan: {why}: from epoch {self._epoch + 2} on with local steps", file=sys.stderr)
            self._control.stop()
        else:
            self._begin(self._epoch + 1)

    def _on_slow_links(self, data: Mapping[str, Any]) -> None:
        """Record what local steps would save, if they are possible."""
        if self._fit.may_change:
            self._waiting_share = data["exchange_s"] / data["step_s"]

    def _warn_of_missing_data(self) -> None:
        """Emit Keras' own warning if the data ended before ``steps_per_epoch``."""
        size, wanted = self._fit.steps_per_execution, self._fit.steps_per_epoch or 0
        if -(-self._hooks.done // size) < wanted // size and not self._control.stopping:
            keras_data.warn_of_missing_data()

    def _warn_of_late_changes(self) -> None:
        """Log once which values a hook between batches has changed, which workers see from the next epoch on."""
        if self._fit.pauses is None and not self._control.muted and not self._late:
            self._late = self._fit.state.outside.changed()
            if self._late:
                logger.warning(
                    "%s: changed between batches; the workers see it from the next epoch on. With "
                    "batch_hooks='exact' they see it from the next batch on.",
                    ", ".join(self._late),
                )

    def _on_epoch_repeated(self, epoch: int) -> None:
        """Go on after an epoch whose end was seen before, and which a restarted server has trained again."""
        self._control.trained_again(epoch)
        if epoch == self._epoch and self._model.stop_training:
            self._control.stop()

    def _close_epoch(self, data: Mapping[str, Any]) -> None:
        if self._fit.validate is not None:
            validation = self._validate(self._fit.validate)
        elif validation := as_logs(data.get("val_logs")):
            self._replay_test_hooks(validation)
        logs = epoch_logs({"logs": data.get("logs"), "val_logs": validation})
        self._logs, self._closed = as_returned(logs, self._fit.log_groups), self._epoch
        measured = {name: data.get(name, 0) for name in ("seconds", "samples")}
        self._measured.append({"epoch": self._epoch, **measured})
        self._callbacks.on_epoch_end(self._epoch, self._logs)
        if self._fit.board is not None and not self._control.muted:
            workers = self._result.get("workers") or self._job.worker_statistics()
            rate = self._fit.state.learning_rate
            self._fit.board.write_epoch(self._epoch, logs, rate, workers, data.get("seconds", 0.0))

    def _validate(self, validate: Validation) -> Logs | None:
        """Evaluate the model here; in a replayed epoch return what an earlier script has sent, if it has."""
        if self._control.muted and self._epoch in self._validated:
            return as_logs(self._validated[self._epoch])
        logs = validate(self._epoch)
        if logs is not None and not self._control.muted:
            self._job.validated(self._epoch, logs)
        return logs

    def _replay_test_hooks(self, logs: Logs) -> None:
        self._callbacks.on_test_begin()
        size = self._fit.steps_per_execution
        for step in range(0, self._fit.validation_steps, size):
            self._callbacks.on_test_batch_begin(step)
            self._callbacks.on_test_batch_end(step + size - 1, dict(logs))
        self._callbacks.on_test_end(dict(logs))

    def _on_shards_restored(self, data: Mapping[str, Any]) -> None:
        seconds, redone = data.get("seconds", 0.0), int(data.get("redone_samples", 0))
        logger.warning("training goes on with restored shards after %.1f s; %d samples are redone", seconds, redone)
        self._redone_samples += redone

    def _finish(self) -> FitRecord:
        if not self._ended:
            raise JobFailed(f"Job {self._job.job_id} has ended, but its server did not say how.")
        manifest = self._job.manifest
        artifact = self._result.get("artifact") or self._job.result_artifact()
        if self._loaded != "everything":
            state = self._job.fetch(artifact)
            self._control.load(State(NO_WEIGHTS, state.optimizer) if self._loaded else state)
        if manifest is not None:
            tables.remember(self._model, manifest, self._job.connection.address, artifact)
        if self._last is not None:
            self._close_epoch(self._last)
        if self.following is None:
            finalize(self._model)
            self._callbacks.on_train_end(self._logs)
        record = FitRecord(self._result.get("workers") or {}, self._redone_samples)
        record.epochs = self._measured
        _warn_of_dropped(record)
        return record


def _warn_of_dropped(workers: Mapping[str, Mapping[str, Any]]) -> None:
    dropped = sum(int(worker.get("dropped") or 0) for worker in workers.values())
    steps = sum(int(worker.get("steps") or 0) for worker in workers.values())
    if dropped:
        logger.warning(
            "%d of %d gradients were refused, as they were NaN or infinite, or would have made weights so.",
            dropped,
            steps,
        )
