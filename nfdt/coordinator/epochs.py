"""The epochs of a job, one after the other."""

from __future__ import annotations

from collections import Counter

from nfdt.coordinator.decisions import Decisions
from nfdt.coordinator.early_tasks import EarlyTasks
from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.epoch_run import EpochRun
from nfdt.coordinator.membership import Member, Membership
from nfdt.coordinator.stream_feed import FeedCredit, StreamFeed
from nfdt.coordinator.training import Gate, TrainingPhase
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.clock import Clock
from nfdt.core.work.instructions import BeginEpoch, EpochDone, Failed, Leave, TrainingDone, Wait, Work
from nfdt.schedulers.local_steps import LocalStepSizes


class EpochSequence:
    """The current epoch of a job, and the transitions from epoch to epoch: the part of a coordinator below its workers.

    Args:
        planner: Tasks of each epoch.
        members: Workers of the job.
        decisions: Policies of the job.
        merger: Untrained state that all workers share.
        gate: Permission of the client and the server to begin.
        effects: Queue of effects.
        clock: Clock of the job.

    Attributes:
        merger: Untrained state that all workers share.
        epoch: Number of the current epoch, or of the next one between two epochs.
        epochs_ended: Number of epochs that have ended, those before the job's first one included.
        began_at: Time at which workers began the current epoch, or the last one.
        epoch_s: Duration of the last epoch, in seconds.
        trained: Number of samples of each worker in the epochs that have ended, and before a restart of the server.
        run: The current epoch; None between two epochs.
        ahead: The next epoch, which workers train while the current one is validated, or its client has not permitted
            the next; None: it has not begun. It becomes the current one, or is dropped without a trace.
        early: Tasks of the next epoch that workers compute before it begins; None: nobody has begun any.
        passed: Whether the shards have more than the end of the last epoch, though no other is permitted.
        ended: Last instruction of every worker, once the job has ended.
        suspended: Whether the shards are lost and not restored yet: there are no transitions.
        quiesced: Whether no synchronous round may begin.
    """

    def __init__(
        self,
        planner: EpochPlanner,
        members: Membership,
        decisions: Decisions,
        merger: StateMerger,
        gate: Gate,
        effects: EffectQueue,
        clock: Clock,
    ) -> None:
        self._planner, self._members, self._decisions, self.merger = planner, members, decisions, merger
        self._gate, self._effects, self._clock = gate, effects, clock
        spec = planner.spec
        self.epoch = self.epochs_ended = spec.fit.initial_epoch
        self.epoch_s = 0.0
        self.trained = Counter[str](spec.fit.trained)
        self._feed = StreamFeed(planner)
        self.run: EpochRun | None = None
        self.ahead: EpochRun | None = None
        self.early: EarlyTasks | None = None
        self._begins_early = spec.cluster.epoch_overlap
        self.passed = self._may_overlap = False
        self.ended: Leave | None = None
        self.suspended = self.quiesced = False
        self._stopping = False
        self._callbacks = "" if spec.callbacks is None else spec.callbacks.state
        self.began_at = clock.now()
        if self.epoch >= spec.fit.epochs:
            self._finish()

    @property
    def phase(self) -> str:
        """``hold`` between epochs, ``train``, ``collect``, ``validate``, ``summarise``; ``ended`` if done or failed."""
        if self.ended:
            return "ended"
        return self.run.current.name if self.run else "hold"

    def waiting_for(self) -> tuple[str, ...]:
        """Return the causes of the wait: names of workers, or "client", "shards", "workers"."""
        if self.ended:
            return ()
        if self.suspended:
            return ("shards",)
        if self.run is None:
            return ("workers",) if self._gate.is_permitted(self.epoch) else ("client",)
        names = self.run.waiting_for()
        if not names and len(self._members) and self._feed.tasks is not None and self.phase == "train":
            return ("client",)
        return names or ("workers",)

    @property
    def feed_credit(self) -> FeedCredit:
        """Credit of a client that feeds the batches of this epoch; zero while the epoch accepts none."""
        accepts = self.phase in ("hold", "train")
        return self._feed.credit(self.epoch) if accepts else FeedCredit(self.epoch, 0, 0)

    @property
    def wants_snapshot(self) -> bool:
        """Whether the client waits for room, and a snapshot of the shards would make much of it."""
        return self.run is not None and self._feed.wants_settled(self.run.training.book.unsettled_bytes)

    def has_room(self, epoch: int, size: int) -> bool:
        """Whether there is room for another batch of a stream of ``size`` bytes, or no need for it."""
        if epoch != self.epoch or self.phase not in ("hold", "train"):
            return True
        return self._feed.has_room(size, self.run.training.book.settled_bytes if self.run else 0)

    def fed(self, epoch: int, data: bytes, samples: int) -> None:
        """Queue one more batch of a stream; drop it if its epoch accepts no more batches.

        Raises:
            ProtocolError: The client sent more batches than it had credit for.
        """
        if epoch == self.epoch and self._feed.tasks is not None and self.phase in ("hold", "train"):
            self._feed.add(epoch, data, samples)
            self.advance()

    def feed_ended(self, epoch: int) -> None:
        """Record that the client's iterator has no more batches for this epoch."""
        if epoch == self.epoch and self._feed.tasks is not None:
            self._feed.tasks.end()
            self.advance()

    def stop_training(self) -> None:
        """End cleanly: drop unleased tasks, complete leased ones, then end the epoch and the job."""
        self._stopping = True
        if self.run and self.phase == "train":
            self.run.training.book.stop()
            self._gate.resume(None)
        self.advance()

    def fail(self, reason: str) -> None:
        """End the job as failed; do nothing once it has ended."""
        if not self.ended:
            self.ended = Leave(f"The job has failed: {reason}")
            self.run = self.ahead = None
            self._effects.add(Failed(reason))

    def advance(self) -> None:
        """Execute every transition that is due."""
        if self.ended or self.suspended:
            return
        if self.run is None:
            self._leave_hold()
        if self.run and self.run.advance():
            self._end(self.run)
        elif self._may_overlap and self.run and self.run.closes:
            self._may_overlap = False
            if not self._stopping and self._gate.open and self._planner.overlaps(self.epoch + 1):
                self._begin_ahead()

    def _leave_hold(self) -> None:
        now, limit_s = self._clock.now(), self._planner.spec.start_timeout_s
        if self._stopping:
            self._finish()
        elif self._gate.may_begin(self.epoch) and (self.ahead or self._members.may_begin(now, limit_s)):
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._members.accept_any_number()
        self._gate.begin_epoch()
        if self.ahead is None:
            self.began_at = now
        run, self.ahead, self.passed = self.ahead or self._run_of(self.epoch, ahead=False), None, False
        run.callbacks = self._callbacks
        self.merger.metrics = b""
        self.run = run
        self._effects.progressed(now, self.epoch, None)
        self._effects.emit("epoch_begin", epoch=self.epoch, steps=run.steps)

    def _run_of(self, epoch: int, *, ahead: bool) -> EpochRun:
        """Plan an epoch for the workers that are ready, who begin with the shared state."""
        workers = self._members.ready_names()
        parts = self._decisions.policy.round_parts(len(workers))
        early, self.early = self.early, None
        if early is not None:
            planned = early.adopt()
        else:
            planned = self._planner.begin(epoch, parts, workers, self._feed.tasks, self._decisions.speeds.sizes)
        begin = BeginEpoch(epoch, self.merger.encoded, planned.order_crc, iteration=planned.iteration, ahead=ahead)
        if self.quiesced:
            planned.book.quiesce()
        training = TrainingPhase(begin, planned.book, self._decisions, self._members, planned.ranks, self._gate)
        parts_of_run = self._planner, self._members, self.merger, self._effects
        return EpochRun(epoch, training, *parts_of_run, self._callbacks, planned.steps)

    def _begin_ahead(self) -> None:
        self._position = self._planner.position
        self.ahead, self._ahead_at, self.passed = self._run_of(self.epoch + 1, ahead=True), self._clock.now(), True

    def compute_early(self, member: Member, now: float) -> Work | Wait:
        """Return tasks of the next epoch for a worker that waits for the end of the current one, or Wait."""
        sizes = self._decisions.speeds.sizes
        if member.epoch != self.epoch or not isinstance(sizes, LocalStepSizes) or not self._may_compute_early:
            return Wait()
        if self.early is None:
            overlap = self._decisions.plan.overlap
            self.early = EarlyTasks(self._planner, self.epoch + 1, self._members.ready_names(), sizes, overlap)
        return self.early.instruct(member, now)

    @property
    def _may_compute_early(self) -> bool:
        """Whether the next epoch certainly follows, on the weights of the end of this one.

        Alone, a worker trains exactly as Keras does. Where it validates, it begins the next epoch on other weights.
        """
        spec, run = self._planner.spec, self.run
        if run is None or run.closes or self.ahead is not None or self._stopping or not self._gate.open:
            return False
        follows = self.epoch + 1 < spec.fit.epochs and self._planner.validation(self.epoch) is None
        independent = self._decisions.policy.facts.independent and len(self._members) > 1
        return follows and independent and spec.train.sized and self._begins_early

    def forgo_early(self) -> None:
        """Begin no task of an epoch before it from now on, and forget those that have begun."""
        self._begins_early = False
        self.drop_early()

    def drop_early(self) -> None:
        """Forget the tasks of the next epoch that have begun."""
        if self.early is not None:
            self.early.drop()
            self.early = None

    def drop_ahead(self) -> None:
        """Drop the epoch that has begun ahead: the shards go back to the end of the one before."""
        self.drop_early()
        if self.ahead is not None:
            self._planner.position = self._position
            for member in self._members.in_epoch(self.ahead.epoch):
                member.epoch = None  # it begins the epoch again
            self.ahead, self.passed = None, False

    def _end(self, run: EpochRun) -> None:
        self._may_overlap = False
        fit, dataset = self._planner.spec.fit, self._planner.dataset
        self._decisions.speeds.describe(self._members.ready_names())
        self.epoch_s, self.epochs_ended = self._clock.now() - self.began_at, self.epoch + 1
        if self.ahead is not None:
            self.began_at = self._ahead_at
        self.trained += run.training.trained
        decision = run.finish(self.epoch_s)
        self._effects.add(EpochDone(self.epoch, decision))
        if decision is not None:
            self._callbacks = decision.state
            self._stopping = self._stopping or decision.stop
        if dataset is not None and dataset.ran_out and not self._stopping:
            text = f"The data ended before steps_per_epoch={fit.steps_per_epoch} of epoch {self.epoch + 1}."
            self._effects.emit("log", worker=None, level="warning", text=text)
        self.run = None
        if self._stopping or self.epoch + 1 >= fit.epochs:
            self._finish()
            return
        self._feed.next_epoch()
        self.epoch += 1
        self.advance()

    def _finish(self) -> None:
        self.ahead, self.ended = None, Leave("Training is over.")
        self._effects.add(TrainingDone())
