"""Training of one job: the loop that executes the effects of the pure coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.errors import JobCancelled, JobFailed
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.effects import EffectHandler, carry_out
from nfdt.jobserver.job_context import ActiveTraining, JobContext
from nfdt.jobserver.job_results import JobResults
from nfdt.model.program.state import dump_state, load_state

TICK_S = 1.0
LATE_S = 5.0  # pause between two ticks after which this server is assumed to have been suspended


class TrainingLoop(EffectHandler):
    """Loop that executes the coordinator's effects and supervises the workers. Used only by the job's own thread.

    Args:
        context: Parts of the job.
        training: Parts that exist during training.
    """

    def __init__(self, context: JobContext, training: ActiveTraining) -> None:
        self._context, self._training = context, training
        self._coordinator: Coordinator = training.coordinator
        self._results = JobResults(context, training)
        self._callbacks = DecisionHandler(context, training)
        self._done = False

    def run(self) -> None:
        """Execute effects until training is done, then write the result."""
        context = self._context
        ticked_at = context.clock.now() - TICK_S
        while not self._done:
            with context.changed:
                context.termination.check()
                if (since_s := context.clock.now() - ticked_at) >= TICK_S:
                    ticked_at = context.clock.now()
                    self._excuse(everybody=since_s >= LATE_S)
                    self._tick(ticked_at)
                effects = self._drain()
                if not effects:
                    context.changed.wait(TICK_S)
            for effect in effects:
                carry_out(effect, self)
        self._results.end_training()

    def _excuse(self, *, everybody: bool) -> None:
        """Restart the timeout of workers with a broken stream, and of all workers after this server was suspended."""
        for job_slot in self._context.slots.living():
            if everybody or job_slot.slot.away:
                self._coordinator.excuse(job_slot.name)

    def _tick(self, now: float) -> None:
        self._check_client(now)
        self._context.job_log.retry()
        self._context.topology.report()
        self._results.report()
        if self._coordinator.phase != "ended":
            self._context.topology.replace_lost(self._coordinator, now)
        self._coordinator.tick()
        self._context.changed.notify_all()

    def _check_client(self, now: float) -> None:
        """Cancel an interactive job whose client is gone, or let it continue detached."""
        context, timeout_s = self._context, self._context.server.attend_timeout_s
        if not context.control.abandoned(now, timeout_s):
            return
        gone = f"Its client has been gone for {timeout_s:.0f} s"
        if context.server.cancels_abandoned:
            raise JobCancelled(f"{gone}.")
        if context.spec.train.kind == "stream":
            raise JobFailed(f"{gone}, and with it the batches that it fed.")
        context.control.interactive = False
        context.job_log.write("warning", f"{gone}; training goes on without its callbacks.")

    def _drain(self) -> list[ins.Effect]:
        """Return the effects to execute; if there are none, forward requests of clients first."""
        context, coordinator = self._context, self._coordinator
        effects = coordinator.drain()
        if effects or context.readers:
            return effects
        if context.control.take_stop():
            coordinator.stop_training()
        self._proceed()
        effects = coordinator.drain()
        if effects:
            context.changed.notify_all()
        return effects

    def _proceed(self) -> None:
        """Let the next epoch begin, or a paused one resume, as far as the client permits."""
        control, coordinator = self._context.control, self._coordinator
        epoch = coordinator.epoch
        if coordinator.standing:
            coordinator.proceed(epoch, control.steps_of(epoch))
            if not coordinator.standing:
                self._context.changed.notify_all()
        elif coordinator.phase == "hold" and control.permits(epoch):
            # One epoch at a time: its end is processed before the next one may begin.
            if self._context.topology.prepare_epoch(coordinator):
                coordinator.proceed(epoch, control.steps_of(epoch))

    # ---- effects

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event to the log of the job."""
        self._context.job_log.record(kind, data)
        if kind == "epoch_begin":
            self._results.epoch_begins()
        if kind in ("progress", "epoch_end"):
            self._results.look_for_nan(data["epoch"], data["logs"])
        if kind == "epoch_end":
            self._results.look_for_growth(data["epoch"], data["logs"])
            self._results.compare_forecast(data)

    def flush_shards(self, epoch: int) -> None:
        """Apply all pushes of the epoch, and store the state of the shards."""
        context, training = self._context, self._training
        self._results.steps_end()
        with context.changed:
            incarnation = context.slots.incarnation
        training.shards.flush()
        if training.recovery is not None:
            training.recovery.renew(incarnation)
        with context.changed:
            self._coordinator.flushed(epoch)
            context.changed.notify_all()

    def forget_worker(self, worker: str, tasks: Sequence[int]) -> None:
        """Free what the shards keep for a lost worker; its tasks that they have applied are not trained again."""
        applied = self._training.shards.forget(worker, tasks)
        with self._context.changed:
            self._coordinator.forgotten(worker, applied)
            self._context.changed.notify_all()

    def give_up(self, worker: str, reason: str) -> None:
        """End the process of a worker that was silent too long."""
        with self._context.changed:
            self._context.slots.kill(self._context.slots.workers[worker])

    def end_epoch(self, epoch: int, decision: ins.CallbackDecision | None) -> None:
        """Carry out what callbacks have decided, write the results of the epoch, and let the topology adapt."""
        if decision is not None:
            self._callbacks.carry_out(epoch, decision)
        self._results.end_epoch(self._callbacks.spec, stops=decision is not None and decision.stop)
        self._review_topology()

    def fail(self, reason: str) -> None:
        """End the job as failed.

        Raises:
            JobFailed: always.
        """
        raise JobFailed(reason)

    def finish(self) -> None:
        """End the loop."""
        self._done = True

    def _review_topology(self) -> None:
        """Adapt the topology to measured speeds between two epochs."""
        context, coordinator = self._context, self._coordinator
        remaining_s = coordinator.epoch_s * (context.spec.fit.epochs - coordinator.epoch)
        if coordinator.phase == "hold" and remaining_s > 0:
            context.topology = context.topology.review(coordinator, self._training.shards, remaining_s)


class DecisionHandler:
    """Handler of what the callbacks of a job decide on a worker. Used only by the job's own thread.

    Args:
        context: Parts of the job.
        training: Parts that exist during training.

    Attributes:
        spec: The callbacks after the last epoch that has ended; None: the job has none.
    """

    def __init__(self, context: JobContext, training: ActiveTraining) -> None:
        self._context, self._training = context, training
        self.spec: CallbacksSpec | None = context.spec.callbacks

    def carry_out(self, epoch: int, decision: ins.CallbackDecision) -> None:
        """Set the learning rate, keep the state of the epoch or restore that of another one, as decided.

        Args:
            epoch: The epoch that has ended.
            decision: The decision.

        Raises:
            UsageError: the learning rate is negative or no number.
        """
        if self.spec is None:
            return
        context, training, before = self._context, self._training, self.spec
        rate = decision.learning_rate
        if rate is not None and rate != before.learning_rate:
            with context.changed:
                context.control.set_learning_rate(rate)
            context.set_learning_rate(training, rate)
        kept = {known: state for known, state in before.kept.items() if known in decision.kept}
        if epoch in decision.kept:
            kept[epoch] = context.store_state(training, training.coordinator.epochs_ended)
        if decision.restored in kept:
            self._restore(kept[decision.restored])
        if decision.stop or epoch + 1 >= context.spec.fit.epochs:
            kept = {}
        self.spec = before.model_copy(update={"state": decision.state, "learning_rate": rate, "kept": kept})

    def _restore(self, artifact: str) -> None:
        """Continue with the weights and the untrained state of another epoch; the optimizer keeps its own."""
        artifacts = self._context.server.artifacts
        state = load_state(artifacts.path(artifact))
        weights = artifacts.put(dump_state(state.weights, {}, state.untrained))
        try:
            self._training.composer.replace(weights)
        finally:
            artifacts.delete(weights)
