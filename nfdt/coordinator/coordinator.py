"""One job's state machine: what workers and client say goes in, instructions and effects come out.

::

    hold ──Proceed, workers ready──> the phases of an epoch (epoch_run.py) ──> hold ... ──> done
                                     train, collect, validate, summarise         fail() ──> failed

No thread, lock, socket or wall clock: the servicer serialises the calls, passes reports in, answers
with what :meth:`Coordinator.next` returns, calls :meth:`Coordinator.tick` about once a second, and
carries out what :meth:`Coordinator.drain` hands it after each call. A worker that is told to Wait is
asked again (no report) whenever anything has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.effect_queue import Outbox
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.epoch_run import EpochRun
from nfdt.coordinator.gate import Gate
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.online_planner import ShardLoad
from nfdt.coordinator.speeds import Pace, told_of_streams
from nfdt.coordinator.training import Training
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
from nfdt.planning import Choice
from nfdt.schedulers.group_shares import StatedSizes


@dataclass(frozen=True)
class FeedCredit:
    """How many batches of ``epoch`` the client may have sent in all, and how many of them are still free."""

    epoch: int
    total: int
    free: int


class Coordinator:
    """Decides what every worker of one job does next. See the module's docstring.

    Attributes:
        epoch: The epoch that is trained, or that will be next.
        epoch_s: Seconds that the last epoch took.
        merger: The untrained state all workers share.
    """

    def __init__(
        self,
        spec: JobSpec,
        policy: ConsistencyPolicy,
        clock: Clock,
        merger: StateMerger | None = None,
        sizes: StatedSizes | None = None,
    ) -> None:
        self.epoch = spec.fit.initial_epoch
        self.merger = merger or StateMerger()
        self._spec = spec
        self._policy = policy
        self._clock = clock
        self._members = Membership(spec.cluster.workers, clock.now())
        self._planner = EpochPlanner(spec, synchronous=policy.name == "bsp")
        self._feed = self._planner.feed()
        self._pace = Pace(spec, policy, sizes)
        self._outbox = Outbox(clock.now())
        self._run: EpochRun | None = None
        self._began_at = clock.now()
        self.epoch_s = 0.0
        self._permitted = -1 if spec.attended else spec.fit.epochs
        self._until: int | None = None
        self._stopping = False
        self._ended: Leave | None = None
        if text := told_of_streams(spec):
            self._outbox.emit("log", worker=None, level="warning", text=text)
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
        """Whether the epoch stands still for the client: :meth:`proceed` lets it go on."""
        return self._run is not None and self._run.training.gate.standing

    @property
    def fresh(self) -> bool:
        """Whether nothing of the current epoch is trained yet."""
        return self._run is None or not self._run.training.book.samples_finished

    # ---- workers

    def joined(self, worker: str, index: int, details: Mapping[str, Any] | None = None) -> None:
        """A worker takes part from now on; ``details`` (pid, host, device) go into its event."""
        if self._members.get(worker):
            self.left(worker, "it connected again")
        self._members.join(worker, index, self._clock.now())
        self._outbox.emit("worker_joined", worker=worker, index=index, **(details or {}))

    def left(self, worker: str, reason: str) -> None:
        """A worker is gone: others do its work. A second call does nothing."""
        member = self._members.leave(worker, reason, self._clock.now())
        if member is None:
            return
        self._policy.left(worker)
        self._pace.left(worker)
        requeued = self._run.current.lost(worker) if self._run else 0
        if not member.released:
            self._outbox.emit("worker_lost", worker=worker, reason=reason, requeued=requeued)
        self._outbox.add(ForgetWorker(worker))
        self._advance()

    def retire_all(self) -> None:
        """Between two epochs: all workers leave in order; :meth:`expect` says how many others will come."""
        for member in self._members.all():
            member.released = True
            self.left(member.name, "others take its place")

    def expect(self, count: int) -> None:
        """The next epoch begins when so many workers are ready."""
        self._members.expect(count)

    def plan_groups(self, load: ShardLoad, remaining_s: float) -> Choice | None:
        """Between two epochs: groups that a job that chooses its row shall form of its workers; None: none."""
        return self._pace.plan_groups(self._ready(), load, remaining_s)

    def renew(self, spec: JobSpec, sizes: StatedSizes | None) -> None:
        """After :meth:`retire_all`: the job goes on as another row, with as many workers as the specification says."""
        self._spec = spec
        self._planner.plan_with(spec)
        self._pace.renew(spec, sizes)
        self.expect(spec.cluster.workers)

    def resumed(self, worker: str, details: Mapping[str, Any]) -> None:
        """Another process speaks for the worker, and may not know what this one was told: it is told again."""
        member = self._members.get(worker)
        if member is not None:
            member.epoch, member.seen_at = None, self._clock.now()
            self._outbox.emit("worker_joined", worker=worker, index=member.index, **details)

    def excuse(self, worker: str) -> None:
        """That nothing is heard of the worker is no fault of its own."""
        if (member := self._members.get(worker)) is not None:
            member.seen_at = self._clock.now()

    def plan_with(self, spec: JobSpec) -> None:
        """The batch sizes of the epochs that begin from now on."""
        self._planner.plan_with(spec)

    def next(self, worker: str, report: Report | None = None) -> Instruction:
        """Take a worker's report (none: it only asks again) and say what it shall do.

        The answer names everything the worker shall do now: a worker that asks without having done
        what it was told before is told the same again.
        """
        member = self._members.get(worker)
        if member is None:
            return Leave("This worker is not part of the job (any more).")
        now = member.seen_at = self._clock.now()
        if not member.ready:
            self._members.is_ready(member)
            self._policy.joined(worker)
            self._pace.joined(worker)
        if report and report.busy:
            return self._ended or Wait()
        if report:
            member.in_flight = report.in_flight
        if self._run and report and self._run.current.absorb(member, report, now):
            training = self._run.current if isinstance(self._run.current, Training) else None
            self._outbox.useful(now, self.epoch, training)
            if training is not None:
                self._gather_speeds(now)
        self._advance()
        if self._ended:
            member.released = True
            return self._ended
        return self._run.current.instruct(member, now) if self._run else Wait()

    # ---- client

    def proceed(self, epoch: int, until: int | None = None) -> None:
        """The client has seen the end of the epoch before: this one may begin, or go on where it stands still.

        It stands still after ``until`` of its steps and at its end (None: it does not), until more are let through.
        """
        self._permitted = max(self._permitted, epoch)
        self._until = until
        if self._run and epoch == self.epoch:
            self._run.training.gate.go_on(until)
        self._advance()

    def replaced(self) -> None:
        """The shared state is another one: where an epoch stands still, its workers go on with that."""
        if self._run and self.standing:
            self._run.training.replaced(self.merger.encoded)

    def stop_training(self) -> None:
        """End cleanly: drop what is not leased, complete what is, then the epoch's end and the job's."""
        self._stopping = True
        if self._run and self.phase == "train":
            self._run.training.book.stop()
            self._run.training.gate.go_on(None)
        self._advance()

    def fed(self, epoch: int, data: bytes, samples: int) -> None:
        """One more batch of a stream. Batches of an epoch that takes none any more are dropped.

        Raises:
            ProtocolError: more batches than the client had credit for.
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
        """The client's iterator has no more batches for this epoch."""
        if self._feed is not None and epoch == self.epoch:
            self._feed.end()
            self._advance()

    @property
    def feed_credit(self) -> FeedCredit:
        """How far the client may feed the current epoch; nothing while it takes no batches."""
        if self._feed is None or self.phase not in ("hold", "train"):
            return FeedCredit(self.epoch, 0, 0)
        capacity = 2 * max(self._spec.cluster.workers, self._feed.parts) + 2
        free = max(0, capacity - self._feed.remaining)
        return FeedCredit(self.epoch, self._feed.accepted + free, free)

    # ---- server

    def flushed(self, epoch: int) -> None:
        """The shards have applied everything of this epoch: the answer to FlushShards."""
        if self._run and epoch == self.epoch:
            self._run.flushed()
            self._advance()

    def fail(self, reason: str) -> None:
        """The job cannot go on; does nothing once it has ended."""
        if not self._ended:
            self._ended = Leave(f"The job has failed: {reason}")
            self._run = None
            self._outbox.add(Failed(reason))

    def tick(self) -> None:
        """Look at the clock: silent workers, nobody left, stalls."""
        if self._ended:
            return
        now, limit_s = self._clock.now(), self._spec.step_timeout_s
        for member in self._members.silent(now, limit_s):
            reason = f"it was silent for more than {limit_s:g} s"
            self._outbox.add(GiveUp(member.name, reason))
            self.left(member.name, reason)
        self._fail_if_alone(now)
        self._advance()
        if not self._ended:
            self._outbox.stall(now, self.waiting_for())

    def drain(self) -> list[Effect]:
        """What is to be done in the world since the last call, in order."""
        return self._outbox.drain()

    @property
    def handed_out(self) -> bool:
        """Whether somebody holds each task of the epoch: who waits for one goes on waiting until one comes back."""
        run = self._run
        return run is not None and isinstance(run.current, Training) and not run.training.book.remaining

    def waiting_for(self) -> tuple[str, ...]:
        """Who is waited for now: names of workers, or "client", "shards", "workers"."""
        if self._ended:
            return ()
        if self._run is None:
            return ("workers",) if self._permitted >= self.epoch else ("client",)
        names = self._run.waiting_for()
        if not names and len(self._members) and self._feed and self.phase == "train":
            return ("client",)
        return names or ("workers",)

    def speeds(self) -> dict[str, dict[str, Any]]:
        """What was known of each worker's speed last: samples and seconds per step, seconds of exchange, batch size."""
        return self._pace.described

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
        elif self._permitted >= self.epoch and self._members.may_begin(self._clock.now(), self._spec.start_timeout_s):
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._members.anybody_will_do()
        workers = self._ready()
        parts = self._policy.round_parts(len(workers))
        epoch = self._planner.begin(self.epoch, parts, workers, self._feed, self._pace.sizes)
        begin = BeginEpoch(self.epoch, self.merger.encoded, epoch.order_crc)
        gate = Gate(self._until)
        training = Training(begin, epoch.book, self._policy, self._pace, self._members, epoch.ranks, gate)
        self.merger.metrics = b""
        validation = self._planner.validation
        number = self.epoch
        self._run = EpochRun(number, training, self._members, self.merger, self._outbox, lambda: validation(number))
        self._began_at = self._clock.now()
        self._outbox.useful(self._began_at, self.epoch, None)
        self._outbox.emit("epoch_begin", epoch=self.epoch, steps=epoch.steps)

    def _end_epoch(self, run: EpochRun) -> None:
        self._pace.describe(self._ready())
        self.epoch_s = self._clock.now() - self._began_at
        run.finish(self.epoch_s)
        self._outbox.add(EpochDone(self.epoch))
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
        self._outbox.add(TrainingDone())

    def _gather_speeds(self, now: float) -> None:
        if self._pace.may_tell(now) and (news := self._pace.news(self._ready())):
            self._outbox.emit("speed", workers=news)
        if self._pace.may_plan(len(self._members)) and (plan := self._pace.plan(self._ready())):
            self._outbox.emit("plan", **plan)

    def _ready(self) -> list[str]:
        return [member.name for member in self._members.ready()]

    def _fail_if_alone(self, now: float) -> None:
        since, limit_s = self._members.alone_since, self._spec.start_timeout_s
        if since is None or now - since < limit_s:
            return
        loss = self._members.last_loss
        what = f"All workers are gone; the last was {loss}." if loss else "No worker has joined."
        self.fail(f"{what} Nobody joined within {limit_s:g} s. Start workers, then submit the job again.")
