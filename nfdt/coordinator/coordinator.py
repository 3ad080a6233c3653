"""The state machine of one job: reports and requests go in, instructions and effects come out.

::

    hold ──Proceed, workers ready──> the phases of an epoch (epoch_run.py) ──> hold ... ──> done
                                     train, collect, validate, summarise         fail() ──> failed

It has no thread, lock, socket or wall clock. The servicer serialises the calls, passes reports in and answers with
what :meth:`Coordinator.next` returns. It calls :meth:`Coordinator.tick` about once a second, and carries out the
effects of :meth:`Coordinator.drain` after each call. For a worker whose instruction is Wait it calls
:meth:`Coordinator.next` again, without a report, whenever anything has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.decisions import Decisions
from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.epoch_run import EpochRun
from nfdt.coordinator.gate import Gate
from nfdt.coordinator.leasing import stream_warning
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.online_planner import ShardLoad
from nfdt.coordinator.training import TrainingPhase
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.clock import Clock
from nfdt.core.errors import ProtocolError
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import (
    BeginEpoch,
    Effect,
    EpochDone,
    Failed,
    ForgetWorker,
    GiveUp,
    Instruction,
    Leave,
    Report,
    TrainingDone,
    Wait,
)
from nfdt.planning import PlanChoice
from nfdt.schedulers.local_sizes import LocalSizes
from nfdt.schedulers.row_splits import RowSplit


@dataclass(frozen=True)
class FeedCredit:
    """Total number of batches of ``epoch`` that the client may send, and the number of batches still free."""

    epoch: int
    total: int
    free: int


class Coordinator:
    """State machine that decides what every worker of one job does next. See the module's docstring.

    Args:
        spec: The job.
        policy: Consistency policy.
        clock: Clock of the job.
        merger: Untrained state that all workers share.
        sizes: Batch sizes that another part of the job decides; None: the sizes of the job's batch policy.
        held: Whether every epoch waits for :meth:`release` too.

    Attributes:
        epoch: Number of the current epoch, or of the next one between two epochs.
        epoch_s: Duration of the last epoch, in seconds.
        merger: Untrained state that all workers share.
    """

    def __init__(
        self,
        spec: JobSpec,
        policy: ConsistencyPolicy,
        clock: Clock,
        merger: StateMerger | None = None,
        sizes: LocalSizes | None = None,
        *,
        held: bool = False,
    ) -> None:
        self.epoch = spec.fit.initial_epoch
        self.merger = merger or StateMerger()
        self._spec = spec
        self._clock = clock
        self._members = Membership(spec.cluster.workers, clock.now())
        self._planner = EpochPlanner(spec, synchronous=policy.facts.synchronous)
        self._feed = self._planner.feed()
        self._decisions = Decisions.of(spec, policy, sizes)
        self._effects = EffectQueue(clock.now())
        self._run: EpochRun | None = None
        self._began_at = clock.now()
        self.epoch_s = 0.0
        self._gate = Gate(-1 if spec.attended else spec.fit.epochs, held=held)
        self._stopping = False
        self._ended: Leave | None = None
        if text := stream_warning(spec):
            self._effects.emit("log", worker=None, level="warning", text=text)
        if self.epoch >= spec.fit.epochs:
            self._finish()

    @property
    def phase(self) -> str:
        """``hold``, ``train``, ``collect``, ``validate``, ``summarise`` or ``ended`` (done or failed)."""
        if self._ended:
            return "ended"
        return self._run.current.name if self._run else "hold"

    @property
    def standing(self) -> bool:
        """Whether the epoch is paused for the client; :meth:`proceed` resumes it."""
        return self._run is not None and self._gate.standing

    @property
    def fresh(self) -> bool:
        """Whether nothing of the current epoch is trained yet."""
        return self._run is None or not self._run.training.book.samples_finished

    # ---- workers

    def joined(self, worker: str, index: int, details: Mapping[str, Any] | None = None) -> None:
        """Add a worker; ``details`` (pid, host, device) go into its event."""
        if self._members.get(worker):
            self.left(worker, "it connected again")
        self._members.join(worker, index, self._clock.now())
        self._effects.emit("worker_joined", worker=worker, index=index, **(details or {}))

    def left(self, worker: str, reason: str) -> None:
        """Remove a worker and requeue its work. A second call does nothing."""
        member = self._members.leave(worker, reason, self._clock.now())
        if member is None:
            return
        self._decisions.left(worker)
        requeued = self._run.current.lost(worker) if self._run else 0
        if not member.released:
            self._effects.emit("worker_lost", worker=worker, reason=reason, requeued=requeued)
        self._effects.add(ForgetWorker(worker))
        if self._planner.dataset is not None:
            self._planner.dataset.forget(worker)
        self._advance()

    def retire_all(self) -> None:
        """Release all workers between two epochs; :meth:`expect` sets the number of their successors."""
        for member in self._members.all():
            member.released = True
            self.left(member.name, "others take its place")

    def expect(self, count: int) -> None:
        """Begin the next epoch only when ``count`` workers are ready."""
        self._members.expect(count)

    def plan_groups(
        self, load: ShardLoad, remaining_s: float, machines: Mapping[str, str] | None = None
    ) -> PlanChoice | None:
        """Return the groups that a planning job forms of its workers between two epochs, or None.

        ``machines`` has the name of each worker's machine, where it is known.
        """
        return self._decisions.plan.look_at_groups(self._ready(), load, remaining_s, machines)

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue the job after :meth:`retire_all` with another preset and the workers of the specification."""
        self._spec = spec
        self._planner.plan_with(spec)
        self._decisions.renew(spec, sizes)
        self.expect(spec.cluster.workers)

    def resumed(self, worker: str, details: Mapping[str, Any]) -> None:
        """Resend the instruction of this worker, because a new leader took it over."""
        member = self._members.get(worker)
        if member is not None:
            member.epoch, member.seen_at = None, self._clock.now()
            self._effects.emit("worker_joined", worker=worker, index=member.index, **details)

    def excuse(self, worker: str) -> None:
        """Restart the worker's timeout: its silence has another cause."""
        if (member := self._members.get(worker)) is not None:
            member.seen_at = self._clock.now()

    def plan_with(self, spec: JobSpec) -> None:
        """Change the batch sizes of the epochs that begin from now on."""
        self._planner.plan_with(spec)

    def next(self, worker: str, report: Report | None = None) -> Instruction:
        """Process a worker's report (None: only a new request) and return its next instruction.

        The instruction is complete: a worker that repeats its request before it has executed it gets the same one.
        """
        member = self._members.get(worker)
        if member is None:
            return Leave("This worker is not part of the job (any more).")
        now = member.seen_at = self._clock.now()
        if not member.ready:
            self._members.set_ready(member)
            self._decisions.joined(worker)
        if report and report.busy:
            return self._ended or Wait()
        if report:
            member.in_flight = report.in_flight
        if report and report.supply and self._planner.dataset is not None:
            self._planner.dataset.report(worker, report.supply)
        if self._run and report and self._run.current.absorb(member, report, now):
            training = self._run.current if isinstance(self._run.current, TrainingPhase) else None
            self._effects.useful(now, self.epoch, training)
            if training is not None:
                self._report_speeds(now)
        self._advance()
        if self._ended:
            member.released = True
            return self._ended
        return self._run.current.instruct(member, now) if self._run else Wait()

    def take_rows(self, worker: str, iteration: int, pass_index: int, number: int) -> RowSplit | None:
        """Give a worker rows of a dataset that workers run; None: no rows are left for it."""
        dataset = self._planner.dataset
        if dataset is None or self._ended or self._members.get(worker) is None:
            return None
        return dataset.take_rows(worker, iteration, pass_index, number)

    # ---- client

    def proceed(self, epoch: int, until: int | None = None) -> None:
        """Let an epoch begin or resume: the client has received the end of the previous one.

        The epoch pauses after ``until`` of its steps and at its end (None: never), until more steps are permitted.
        """
        self._gate.permit(epoch, until)
        if self._run and epoch == self.epoch:
            self._gate.go_on(until)
        self._advance()

    def replaced(self) -> None:
        """Make the workers of a paused epoch continue with the shared state, which was replaced."""
        if self._run and self.standing:
            self._run.training.replaced(self.merger.encoded)

    def stop_training(self) -> None:
        """End cleanly: drop unleased tasks, complete leased ones, then end the epoch and the job."""
        self._stopping = True
        if self._run and self.phase == "train":
            self._run.training.book.stop()
            self._gate.go_on(None)
        self._advance()

    def fed(self, epoch: int, data: bytes, samples: int) -> None:
        """Queue one more batch of a stream; drop it if its epoch accepts no more batches.

        Raises:
            ProtocolError: The client sent more batches than it had credit for.
        """
        if self._feed is None or epoch != self.epoch or self.phase not in ("hold", "train"):
            return
        if self.feed_credit.free < 1:
            raise ProtocolError(
                f"Feed of epoch {epoch}: expected at most {self.feed_credit.total} batches by now. "
                "Received one more. The client must wait for credit."
            )
        self._feed.feed(data, samples)
        self._advance()

    def feed_ended(self, epoch: int) -> None:
        """Record that the client's iterator has no more batches for this epoch."""
        if self._feed is not None and epoch == self.epoch:
            self._feed.end()
            self._advance()

    @property
    def feed_credit(self) -> FeedCredit:
        """Credit of the client for the current epoch; zero while the epoch accepts no batches."""
        if self._feed is None or self.phase not in ("hold", "train"):
            return FeedCredit(self.epoch, 0, 0)
        capacity = 2 * max(self._spec.cluster.workers, self._feed.parts) + 2
        free = max(0, capacity - self._feed.remaining)
        return FeedCredit(self.epoch, self._feed.accepted + free, free)

    # ---- server

    def release(self) -> None:
        """Let the next epoch begin once the client permits it; only for a coordinator that is ``held``."""
        self._gate.release()
        self._advance()

    def flushed(self, epoch: int) -> None:
        """Record the answer to FlushShards: the shards have applied every push of this epoch."""
        if self._run and epoch == self.epoch:
            self._run.flushed()
            self._advance()

    def fail(self, reason: str) -> None:
        """End the job as failed; do nothing once it has ended."""
        if not self._ended:
            self._ended = Leave(f"The job has failed: {reason}")
            self._run = None
            self._effects.add(Failed(reason))

    def tick(self) -> None:
        """Check the timeouts: silent workers, a job without workers, stalls."""
        if self._ended:
            return
        now, limit_s = self._clock.now(), self._spec.step_timeout_s
        for member in self._members.silent(now, limit_s):
            reason = f"it was silent for more than {limit_s:g} s"
            self._effects.add(GiveUp(member.name, reason))
            self.left(member.name, reason)
        self._fail_if_alone(now)
        self._advance()
        if not self._ended:
            self._effects.stall(now, self.waiting_for())

    def drain(self) -> list[Effect]:
        """Return the effects since the last call, in order."""
        return self._effects.drain()

    @property
    def handed_out(self) -> bool:
        """Whether every task of the epoch is leased: waiting workers keep waiting until one is returned."""
        run = self._run
        return run is not None and isinstance(run.current, TrainingPhase) and not run.training.book.remaining

    def waiting_for(self) -> tuple[str, ...]:
        """Return the causes of the wait: names of workers, or "client", "shards", "workers"."""
        if self._ended:
            return ()
        if self._run is None:
            return ("workers",) if self._gate.is_permitted(self.epoch) else ("client",)
        names = self._run.waiting_for()
        if not names and len(self._members) and self._feed and self.phase == "train":
            return ("client",)
        return names or ("workers",)

    def speeds(self) -> dict[str, dict[str, Any]]:
        """Return each worker's last known speed: samples per second, seconds per step and per exchange, batch size."""
        return self._decisions.report.described

    # ---- transitions

    def _advance(self) -> None:
        if self._ended:
            return
        if self._run is None:
            self._leave_hold()
        if self._run and self._run.advance():
            self._end_epoch(self._run)

    def _leave_hold(self) -> None:
        if self._stopping:
            self._finish()
        elif self._gate.may_begin(self.epoch) and self._members.may_begin(
            self._clock.now(), self._spec.start_timeout_s
        ):
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._members.accept_any_number()
        workers = self._ready()
        parts = self._decisions.policy.round_parts(len(workers))
        epoch = self._planner.begin(self.epoch, parts, workers, self._feed, self._decisions.speeds.sizes)
        begin = BeginEpoch(self.epoch, self.merger.encoded, epoch.order_crc, iteration=epoch.iteration)
        self._gate.begin_epoch()
        training = TrainingPhase(begin, epoch.book, self._decisions, self._members, epoch.ranks, self._gate)
        self.merger.metrics = b""
        validation = self._planner.validation
        number = self.epoch
        self._run = EpochRun(number, training, self._members, self.merger, self._effects, lambda: validation(number))
        self._began_at = self._clock.now()
        self._effects.useful(self._began_at, self.epoch, None)
        self._effects.emit("epoch_begin", epoch=self.epoch, steps=epoch.steps)

    def _end_epoch(self, run: EpochRun) -> None:
        self._decisions.report.describe(self._ready())
        self.epoch_s = self._clock.now() - self._began_at
        run.finish(self.epoch_s)
        self._effects.add(EpochDone(self.epoch))
        if self._planner.dataset is not None and self._planner.dataset.ran_out and not self._stopping:
            text = f"The data ended before steps_per_epoch={self._spec.fit.steps_per_epoch} of epoch {self.epoch + 1}."
            self._effects.emit("log", worker=None, level="warning", text=text)
        self._run = None
        if self._stopping or self.epoch + 1 >= self._spec.fit.epochs:
            self._finish()
            return
        self._planner.feed_over(self._feed)
        self.epoch += 1
        self._feed = self._planner.feed()
        self._advance()

    def _finish(self) -> None:
        self._ended = Leave("Training is over.")
        self._effects.add(TrainingDone())

    def _report_speeds(self, now: float) -> None:
        report, plan = self._decisions.report, self._decisions.plan
        if report.is_due(now) and (speeds := report.look(self._ready(), now)):
            self._effects.emit("speed", workers=speeds)
        plan.reported()
        if plan.is_due(len(self._members)) and (decision := plan.look(self._ready())):
            self._effects.emit("plan", **decision)

    def _ready(self) -> list[str]:
        return [member.name for member in self._members.ready()]

    def _fail_if_alone(self, now: float) -> None:
        since, limit_s = self._members.alone_since, self._spec.start_timeout_s
        if since is None or now - since < limit_s:
            return
        loss = self._members.last_loss
        what = f"All workers are gone; the last was {loss}." if loss else "No worker has joined."
        self.fail(f"{what} Nobody joined within {limit_s:g} s. Start workers, then submit the job again.")
