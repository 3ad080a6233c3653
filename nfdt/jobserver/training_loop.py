"""Training of one job: the loop that executes the effects of the pure coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.online_planner import ShardLoad
from nfdt.core.errors import JobCancelled, JobFailed
from nfdt.core.specs.callbacks import CallbacksSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.instructions import EffectHandler, carry_out
from nfdt.jobserver.job_core import ActiveTraining, JobCore
from nfdt.jobserver.job_results import JobResults
from nfdt.jobserver.topologies.shard_recovery import ShardRecovery
from nfdt.model.program.state import dump_state_parts, load_state

TICK_S = 0.25  # between two looks at the workers
SUPERVISE_S = 1.0  # between two looks at everything else
MOST_SUPERVISE_S = 5.0
REST = 49  # pause between two looks at the workers, in times of the duration of a look
LATE_S = 5.0  # pause between two ticks after which this server is assumed to have been suspended


class TrainingLoop(EffectHandler):
    """Loop that executes the coordinator's effects and supervises the workers. Used only by the job's own thread.

    Args:
        core: Core of the job.
        training: Parts that exist during training.
    """

    def __init__(self, core: JobCore, training: ActiveTraining) -> None:
        self._core, self._training = core, training
        self._mailbox, self._clock = core.mailbox, core.server.clock
        self._coordinator: Coordinator = training.coordinator
        self._results = JobResults(core, training)
        self._callbacks = DecisionHandler(core, training)
        self._ticked_at = self._clock.now() - TICK_S
        self._tick_s, self._supervise_s = TICK_S, SUPERVISE_S  # more with thousands of workers
        self._supervised_at = self._ticked_at - SUPERVISE_S
        self._reviews = self._done = False

    def run(self) -> None:
        """Execute effects until training is done, then write the result."""
        self._mailbox.add_timer(self._look_at_clock)
        while not self._done:
            for effect in self._mailbox.wait(self._next_effects, TICK_S) or ():
                carry_out(effect, self)
        self._results.end_training()

    def _next_effects(self) -> list[ins.Effect] | None:
        """Return the effects to execute; if there are none, forward requests of clients first."""
        self._mailbox.check()
        coordinator = self._coordinator
        effects = coordinator.drain()
        if not effects and not self._core.readers:
            if self._core.control.pop_stop():
                self._mailbox.handle(coordinator.stop_training)
            self._proceed()
            effects = coordinator.drain()
        return effects or None

    def _look_at_clock(self) -> float | None:
        """Look at the workers, and once a second at the rest, but not while the topology is changed; a timer."""
        if self._done:
            return None
        since_s = self._clock.now() - self._ticked_at
        if since_s < self._tick_s or self._reviews:
            return max(self._tick_s - since_s, 0.0) or TICK_S
        self._ticked_at += since_s
        self._mailbox.handle(lambda: self._tick(since_s))
        self._tick_s = self._rest(TICK_S, self._ticked_at, SUPERVISE_S)
        return self._tick_s

    def _rest(self, least_s: float, began: float, most_s: float) -> float:
        """Return the seconds until the next look, which are more than ``least_s`` if one takes long."""
        return min(max(least_s, REST * (self._clock.now() - began)), most_s)

    def _tick(self, since_s: float) -> None:
        for job_slot in self._core.slots.living():
            if (silent_s := self._core.server.pool.silent_s(job_slot.slot)) is not None:
                self._coordinator.heard(job_slot.name, silent_s)
            # Their silence is explained: the stream of the slot broke, or this server was suspended.
            if job_slot.slot.away or since_s >= LATE_S:
                self._coordinator.excuse(job_slot.name)
        if self._ticked_at - self._supervised_at >= self._supervise_s:
            self._supervised_at = self._ticked_at
            self._supervise()
            self._supervise_s = self._rest(SUPERVISE_S, self._ticked_at, MOST_SUPERVISE_S)
        self._coordinator.tick()

    def _supervise(self) -> None:
        self._check_client(self._ticked_at)
        self._core.job_log.retry()
        self._core.topology.report()
        self._results.report()
        if self._coordinator.phase != "ended":
            self._core.topology.replace_lost(self._coordinator, self._ticked_at)

    def _check_client(self, now: float) -> None:
        """Cancel an interactive job whose client is gone, or let it continue detached."""
        core, server = self._core, self._core.server
        timeout_s = server.attend_timeout_s
        if not core.control.abandoned(now, timeout_s):
            return
        gone = f"Its client has been gone for {timeout_s:.0f} s"
        if server.embedded:
            raise JobCancelled(f"{gone}.")
        if core.spec.train.kind == "stream":
            raise JobFailed(f"{gone}, and with it the batches that it fed.")
        core.control.interactive = False
        self._core.job_log.write("warning", f"{gone}; training goes on without its callbacks.")

    def _proceed(self) -> None:
        """Let the next epoch begin, or a paused one resume, as far as the client permits."""
        control, coordinator = self._core.control, self._coordinator
        proceed = partial(coordinator.proceed, coordinator.epoch, control.steps_of(coordinator.epoch))
        if coordinator.standing:
            self._mailbox.handle(proceed)
        elif coordinator.phase == "hold" and control.permits(coordinator.epoch):
            # One epoch at a time: its end is processed before the next one may begin.
            if self._core.topology.prepare_epoch(coordinator):
                if self._training.recovery is not None:
                    if control.steps_of(coordinator.epoch) is not None:
                        self._training.recovery.roll_back("Pauses were asked for")
                    self._mailbox.handle(self._training.recovery.outdate)
                self._mailbox.handle(proceed)

    # ---- effects

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event to the log of the job."""
        if kind == "epoch_end":
            self._results.count_epoch()
            load = ShardLoad.of(self._core.shard_statistics)
            if slow := self._mailbox.read(lambda: self._coordinator.slow_links(load)):
                self._core.job_log.record("slow_links", slow)
            data = {**data, "learning_rate": self._results.learning_rate()}
        self._core.job_log.record(kind, data)
        if kind == "epoch_begin":
            self._results.epoch_begins()
        if kind in ("progress", "epoch_end"):
            self._results.look_for_nan(data["epoch"], data["logs"])
        if kind == "epoch_end":
            self._results.look_for_growth(data["epoch"], data["logs"])
            self._results.compare_forecast(data)

    def flush_shards(self, epoch: int) -> None:
        """Apply all pushes of the epoch, and store the state of the shards."""
        training, mailbox = self._training, self._mailbox
        self._results.steps_end()
        incarnation = mailbox.read(lambda: self._core.slots.incarnation)
        mailbox.call(training.shards.flush)
        kept = False
        if training.recovery is not None:
            spec = self._core.spec
            if epoch + 1 >= spec.fit.epochs and spec.validation is None:  # the result is stored at once
                training.recovery.forgo(incarnation)
            else:
                mailbox.call(partial(training.recovery.renew, incarnation))
                kept = epoch + 1 < spec.fit.epochs and self._overlaps(training.recovery)
        if kept:
            mailbox.call(partial(training.shards.keep, True))
        mailbox.handle(lambda: self._coordinator.flushed(epoch, kept=kept))

    def _overlaps(self, recovery: ShardRecovery) -> bool:
        """Whether the next epoch may begin ahead: the end of this one is stored, and nobody has changed one before."""
        core = self._core
        able = core.spec.cluster.epoch_overlap and core.may_keep_weights and not recovery.rolled_back
        return able and bool(self._mailbox.read(recovery.present_state))

    def forget_worker(self, worker: str, tasks: Sequence[int]) -> None:
        """Free what the shards keep for a lost worker; its tasks that they have applied are not trained again."""
        applied = self._mailbox.call(partial(self._training.shards.forget, worker, tasks))
        self._mailbox.handle(lambda: self._coordinator.forgotten(worker, applied))

    def give_up(self, worker: str, reason: str) -> None:
        """End the process of a worker that was silent too long."""
        self._mailbox.handle(lambda: self._core.slots.kill(self._core.slots.workers[worker]))

    def end_epoch(self, epoch: int, decision: ins.CallbackDecision | None) -> None:
        """Carry out what callbacks have decided, write the results of the epoch, and let the topology adapt."""
        if self._mailbox.read(lambda: self._coordinator.passed):
            self._mailbox.call(partial(self._training.shards.keep, False))  # the validation is over
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
        core, coordinator = self._core, self._coordinator
        remaining_s = coordinator.epoch_s * (core.spec.fit.epochs - coordinator.epoch)
        if coordinator.phase == "hold" and remaining_s > 0:
            self._reviews = True
            core.topology = core.topology.review(coordinator, self._training.shards, remaining_s)
            self._reviews = False


class DecisionHandler:
    """Handler of what the callbacks of a job decide on a worker. Used only by the job's own thread.

    Args:
        core: Core of the job.
        training: Parts that exist during training.

    Attributes:
        spec: The callbacks after the last epoch that has ended; None: the job has none.
    """

    def __init__(self, core: JobCore, training: ActiveTraining) -> None:
        self._core, self._training = core, training
        self.spec: CallbacksSpec | None = core.spec.callbacks

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
        core, training, before, mailbox = self._core, self._training, self.spec, self._core.mailbox
        rate = decision.learning_rate
        if rate is not None and rate != before.learning_rate:
            mailbox.handle(partial(core.control.set_learning_rate, rate))
            mailbox.call(partial(core.set_learning_rate, training, rate))
        kept = {known: state for known, state in before.kept.items() if known in decision.kept}
        if epoch in decision.kept:
            kept[epoch] = self._core.store(partial(training.composer.compose, training.coordinator.epochs_ended))
        if decision.restored in kept:
            self._restore(kept[decision.restored])
        if decision.stop or epoch + 1 >= core.spec.fit.epochs:
            kept = {}
        self.spec = before.model_copy(update={"state": decision.state, "learning_rate": rate, "kept": kept})

    def _restore(self, artifact: str) -> None:
        """Continue with the weights and the untrained state of another epoch; the optimizer keeps its own."""
        artifacts = self._core.server.artifacts
        state = load_state(artifacts.path(artifact))
        weights = artifacts.put(*dump_state_parts(state.weights, {}, state.untrained))
        try:
            self._core.mailbox.call(partial(self._core.write, self._training, weights))
        finally:
            artifacts.delete(weights)
