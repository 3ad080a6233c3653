"""One job from its submission to its end: a thread that carries out what the pure coordinator decides."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.online_planner import ShardLoad, plan_event
from nfdt.coordinator.topology_view import seen_by_coordinator, slots_of
from nfdt.core.errors import JobCancelled, JobFailed, NfdtError
from nfdt.core.host.machine import give_back_memory
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.jobserver.assembly import JobAssembly
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.desk import Parts
from nfdt.jobserver.outcome import JobOutcome, explained, outcome_of
from nfdt.jobserver.termination import ServerStopping
from nfdt.jobserver.topologies.switch import TopologySwitch, may_form_groups
from nfdt.jobserver.worker_statistics import merge_statistics
from nfdt.planning import PlanChoice

_log = logging.getLogger(__name__)

TICK_S = 1.0
LATE_S = 5.0
ALONE_S = 20.0


class JobRun(JobAssembly):
    """See the module.

    Attributes:
        thread: Runs the job; started once the job has its slots.
    """

    def __init__(self, server: ServerContext, job_id: str, spec: JobSpec, session: str) -> None:
        super().__init__(server, job_id, spec, session)
        self._alone_since: float | None = None
        self._told_launch_failure = False
        self._refused: dict[str, int] = {}
        self._may_form_groups = may_form_groups(server, spec)
        self.thread = threading.Thread(target=self._live, name=job_id, daemon=True)

    def _live(self) -> None:
        outcome: JobOutcome | None = None
        try:
            parts = self._begin()
            self._train(parts)
            self._keep_result(parts)
            outcome = JobOutcome("succeeded")
        except BaseException as error:
            if not isinstance(error, (NfdtError, ServerStopping)):
                _log.exception("job %s", self.job_id)
            reason = self._termination.reason_behind(error)
            if self.ring is not None:
                reason = explained(self.ring, reason)
            outcome = None if isinstance(reason, ServerStopping) else outcome_of(reason)
        self.close(outcome)
        give_back_memory()

    def close(self, outcome: JobOutcome | None) -> None:
        """Let everything go, then tell how the job ended (None: tell nothing); each happens whatever fails before."""
        with contextlib.ExitStack() as last_things:
            if outcome is not None:
                last_things.callback(self.job_log.end, outcome)
            last_things.callback(self._let_go, usable=outcome is not None and outcome.state != "failed")
            if self.ring is not None and outcome is not None:
                self.job_log.ring_messages(*self.ring.news())

    def _let_go(self, *, usable: bool) -> None:
        with self._changed:
            self._ended = True
            if self._succession is not None:
                self._succession.shard.close()
            self._changed.notify_all()
        self.feed.close()
        self.slots.release()
        if self._server.rings is not None:
            self._server.rings.release(self.job_id, usable=usable)
        if self._parts is not None:
            self._parts.shards.close()

    def _begin(self) -> Parts:
        self.job_log.begin(JobOutcome("starting"))
        with self._changed:
            for job_slot in self.slots.shards:
                self.slots.start_shard(job_slot)
            self._await_shards()
            if self.groups is not None:
                self.groups.form(self._wait_for)
        parts = self._assemble()
        with self._changed:
            self._parts = parts
            rate = self._wishes.learning_rate
        if rate is not None:
            self._set_learning_rate(parts, rate)
        with self._changed:
            self._seat_workers(parts, self.slots.living())
        self.job_log.begin(JobOutcome("running"))
        return parts

    def _train(self, parts: Parts) -> None:
        """Carry out effects until training is done."""
        ticked_at = self._clock.now() - TICK_S
        done = False
        while not done:
            with self._changed:
                self._termination.check()
                if (since_s := self._clock.now() - ticked_at) >= TICK_S:
                    ticked_at = self._clock.now()
                    self._excuse(parts, everybody=since_s >= LATE_S)
                    self._tick(parts, ticked_at)
                effects = self._drain(parts)
                if not effects:
                    self._changed.wait(TICK_S)
            for effect in effects:
                done = self._carry_out(parts, effect) or done

    def _excuse(self, parts: Parts, *, everybody: bool) -> None:
        """Nobody is silent whose stream is being taken up, nor anybody while this server itself did not run."""
        for job_slot in self.slots.living():
            if everybody or job_slot.slot.away:
                parts.coordinator.excuse(job_slot.name)

    def _tick(self, parts: Parts, now: float) -> None:
        self._attend(now)
        if self.ring is not None:
            self.job_log.ring_messages(*self.ring.news())
        if parts.coordinator.phase != "ended":
            self._replace_lost(parts, now)
        parts.coordinator.tick()
        self._changed.notify_all()

    def _drain(self, parts: Parts) -> list[ins.Effect]:
        """What is to be done; with nothing left to do, what clients have said is passed on."""
        coordinator = parts.coordinator
        if self.spec.train.kind == "stream":
            self._pump_feed(coordinator)
        effects = coordinator.drain()
        if effects or self._readers:
            return effects
        if self._wishes.take_stop():
            coordinator.stop_training()
        epoch = coordinator.epoch
        if coordinator.standing:
            coordinator.proceed(epoch, self._wishes.steps_of(epoch))
            if not coordinator.standing:
                self._changed.notify_all()
        elif coordinator.phase == "hold" and self._wishes.permits(epoch):
            # One epoch at a time: its end is carried out before the next one may begin.
            if self._succession is None:
                coordinator.proceed(epoch, self._wishes.steps_of(epoch))
            elif ranks := self.slots.ranks:  # an elastic ring says how many there are
                coordinator.plan_with(seen_by_coordinator(self.spec, ranks=ranks))
                coordinator.proceed(epoch, self._wishes.steps_of(epoch))
        effects = coordinator.drain()
        if effects:
            self._changed.notify_all()
        return effects

    def _pump_feed(self, coordinator: Coordinator) -> None:
        credit = coordinator.feed_credit
        self.feed.allow(credit.epoch, credit.total)
        news = False
        while (batch := self.feed.take()) is not None:
            coordinator.fed(batch.epoch, batch.data, batch.samples)
            news = True
        if self.feed.exhausted(credit.epoch):
            coordinator.feed_ended(credit.epoch)
            news = True
        if news:
            self._changed.notify_all()

    def _attend(self, now: float) -> None:
        """An attended job whose client is gone is cancelled, or goes on alone."""
        if not self._wishes.abandoned(now, self._server.attend_timeout_s):
            return
        gone = f"Its client has been gone for {self._server.attend_timeout_s:.0f} s"
        if self._server.cancels_abandoned:
            raise JobCancelled(f"{gone}.")
        if self.spec.train.kind == "stream":
            raise JobFailed(f"{gone}, and with it the batches that it fed.")
        self._wishes.attended = False
        self.job_log.tell("warning", f"{gone}; training goes on without its callbacks.")

    def _replace_lost(self, parts: Parts, now: float) -> None:
        """Free slots take the place of workers that are gone or never came; groups are not replaced."""
        if self.groups is not None:
            self.groups.tell_losses()
            if reason := self.groups.all_gone():
                parts.coordinator.fail(reason)
            return
        missing = slots_of(self.spec) - len(self.slots.living())
        launch_failure = ""
        if missing > 0:
            self._seat_workers(parts, self.slots.acquire_workers(missing))
            launch_failure = self._tell_launch_failure()
        if self.slots.living():
            self._alone_since = None
            return
        self._alone_since = now if self._alone_since is None else self._alone_since
        attending, _ = self._server.pool.attending("worker", self.slots.accepts)
        if now - self._alone_since > ALONE_S and not (attending and self.slots.may_join):
            why = "no worker slot attends the server any more" if not attending else "as many as may have taken over"
            last = f" The last: {self.slots.last_death}." if self.slots.last_death else ""
            failed = f" {launch_failure}." if launch_failure else ""
            parts.coordinator.fail(f"All workers are gone, and {why}.{failed}{last}")

    def _tell_launch_failure(self) -> str:
        """Why this machine starts no worker slots, which the job is told once; "" where it does."""
        launcher = self._server.launcher
        failure = launcher.failure if launcher is not None and self._server.launches_workers else None
        if failure and not self._told_launch_failure:
            self.job_log.tell("warning", f"Workers that are gone are not replaced. {failure}.")
        self._told_launch_failure = failure is not None
        return failure or ""

    def _carry_out(self, parts: Parts, effect: ins.Effect) -> bool:
        """Do what the coordinator asks; True when training is done."""
        match effect:
            case ins.Emit(kind, data):
                self.job_log.record(kind, data)
            case ins.FlushShards(epoch):
                parts.shards.flush()
                with self._changed:
                    parts.coordinator.flushed(epoch)
                    self._changed.notify_all()
            case ins.ForgetWorker(worker):
                parts.shards.forget(worker)
            case ins.GiveUp(worker):
                with self._changed:
                    self.slots.dismiss(self.slots.workers[worker])
            case ins.EpochDone():
                self._keep_checkpoint(parts)
                self._review_topology(parts)
            case ins.Failed(reason):
                raise JobFailed(reason)
            case ins.TrainingDone():
                return True
        return False

    def _review_topology(self, parts: Parts) -> None:
        """Between two epochs groups may be formed, or formed anew."""
        coordinator = parts.coordinator
        remaining_s = coordinator.epoch_s * (self.spec.fit.epochs - coordinator.epoch)
        if coordinator.phase != "hold" or remaining_s <= 0:
            return
        if self.groups is not None:
            with self._changed:
                if job_slots := self.groups.review(self._wait_for, remaining_s, coordinator.retire_all):
                    coordinator.expect(len(job_slots))
                    self._seat_workers(parts, job_slots)
        elif self._may_form_groups:
            load = ShardLoad.of(parts.shards.statistics())
            with self._changed:
                choice = coordinator.plan_groups(load, remaining_s)
                if choice is not None:
                    self._form_groups(parts, choice)

    def _form_groups(self, parts: Parts, choice: PlanChoice) -> None:
        self._may_form_groups = False
        if self.slots.count_here() < self.spec.cluster.workers:  # some are lost, and their numbers with them
            return
        turn = TopologySwitch(self._server, self.job_id, self.spec, self.slots, self.job_log, choice.preset.groups)
        if turn.begin(self._wait_for, self._termination.check):
            self.job_log.record("plan", plan_event(choice))
            turn.complete(parts.coordinator)
            self.spec, self.groups = turn.spec, turn.groups
            self._seat_workers(parts, turn.groups.job_slots())

    def _keep_checkpoint(self, parts: Parts) -> None:
        """Write the epoch's state down, before the next one may begin."""
        self._moment += 1
        counts = parts.shards.statistics() if self.ring is None else []
        statistics = self._statistics(counts)
        self.job_log.workers(statistics)
        self._tell_refused(statistics)
        if self._server.keeps_checkpoints:
            self.job_log.checkpoint(parts.composer.compose(self._moment))

    def _tell_refused(self, statistics: Mapping[str, Mapping[str, Any]]) -> None:
        """Name, epoch by epoch, the workers of which shards refused pushes."""
        for name, row in statistics.items():
            refused = int(row.get("dropped") or 0)
            if news := refused - self._refused.get(name, 0):
                self.job_log.tell(
                    "warning",
                    f"{news} pushes of {name} were refused in the epoch that has ended: the gradient was NaN or "
                    "infinite, or would have made weights so. The weights are those before.",
                )
            self._refused[name] = refused

    def _keep_result(self, parts: Parts) -> None:
        artifact = parts.composer.compose(self._moment)
        self.job_log.result(artifact, self._statistics(parts.shards.statistics()))

    def _statistics(self, shards: Any = ()) -> dict[str, dict[str, Any]]:
        with self._changed:
            speeds = self._parts.coordinator.speeds() if self._parts else {}
            rows = {
                name: {**job_slot.details, **job_slot.report, **speeds.get(name, {})}
                for name, job_slot in self.slots.workers.items()
            }
        return merge_statistics(rows, shards)
