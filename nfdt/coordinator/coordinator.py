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

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.decisions import Decisions
from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.epoch_run import EpochRun
from nfdt.coordinator.epochs import EpochSequence, FeedCredit
from nfdt.coordinator.leasing import stream_warning
from nfdt.coordinator.membership import Membership
from nfdt.coordinator.online_planner import ShardLoad
from nfdt.coordinator.recovery import Recovery
from nfdt.coordinator.training import Gate, TrainingPhase
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.clock import Clock
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import Effect, ForgetWorker, GiveUp, Instruction, Leave, Report, Wait
from nfdt.planning.cost_model import PlanChoice
from nfdt.schedulers.batch_policies import LocalSizes
from nfdt.schedulers.pulled import RowSplit


class Coordinator:
    """State machine that decides what every worker of one job does next. See the module's docstring.

    Args:
        spec: The job.
        policy: Consistency policy.
        clock: Clock of the job.
        merger: Untrained state that all workers share.
        sizes: Batch sizes that another part of the job decides; None: the sizes of the job's batch policy.
        held: Whether every epoch waits for :meth:`release` too.
        restorable: Whether the server takes snapshots of the shards and restores lost ones, in a flat topology.

    Attributes:
        merger: Untrained state that all workers share.
        recovery: Snapshots of the shards, and their loss.
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
        restorable: bool = False,
    ) -> None:
        self.merger = merger or StateMerger()
        self._clock = clock
        self._members = Membership(spec.cluster.workers, clock.now())
        self._planner = EpochPlanner(spec, synchronous=policy.facts.synchronous, restorable=restorable)
        self._decisions = Decisions.of(spec, policy, sizes)
        self._effects = EffectQueue(clock.now())
        self._gate = Gate(-1 if spec.attended else spec.fit.epochs, held=held)
        if text := stream_warning(spec):
            self._effects.emit("log", worker=None, level="warning", text=text)
        parts = self._planner, self._members, self._decisions, self.merger, self._gate, self._effects, clock
        self._epochs = EpochSequence(*parts)
        self.recovery = Recovery(self._epochs, self._planner, self._members, self._effects, clock)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, or of the next one between two epochs."""
        return self._epochs.epoch

    @property
    def epochs_ended(self) -> int:
        """Number of epochs that have ended, those before the job's first one included."""
        return self._epochs.epochs_ended

    @property
    def epoch_s(self) -> float:
        """Duration of the last epoch, in seconds."""
        return self._epochs.epoch_s

    @property
    def phase(self) -> str:
        """``hold``, ``train``, ``collect``, ``validate``, ``summarise`` or ``ended`` (done or failed)."""
        return self._epochs.phase

    @property
    def standing(self) -> bool:
        """Whether the epoch is paused for the client; :meth:`proceed` resumes it."""
        return self._run is not None and self._gate.standing

    @property
    def steps_finished(self) -> int:
        """Number of finished steps of the running epoch, also where lost shards went back since then; 0 without one."""
        return max(self._run.training.book.steps_finished, self._gate.stood_at) if self._run else 0

    @property
    def waiting_tasks(self) -> int:
        """Number of tasks of the running epoch that no worker has yet; 0 without one."""
        return self._run.training.book.remaining if self._run else 0

    @property
    def fresh(self) -> bool:
        """Whether nothing of the current epoch is trained yet."""
        return self._run is None or not self._run.training.book.samples_finished

    @property
    def _run(self) -> EpochRun | None:
        return self._epochs.run

    # ---- workers

    def joined(self, worker: str, index: int, details: Mapping[str, Any] | None = None) -> None:
        """Add a worker; ``details`` (pid, host, device) go into its event."""
        if self._members.get(worker):
            self.left(worker, "it connected again")
        self._members.join(worker, index, self._clock.now())
        self._effects.emit("worker_joined", worker=worker, index=index, **(details or {}))

    def left(self, worker: str, reason: str) -> None:
        """Remove a worker and requeue its work, as far as the shards lack it. A second call does nothing."""
        member = self._members.leave(worker, reason, self._clock.now())
        if member is None:
            return
        self._decisions.left(worker)
        requeued = self._run.current.lost(worker) if self._run else 0
        if not member.released:
            self._effects.emit("worker_lost", worker=worker, reason=reason, requeued=requeued)
        self._effects.add(ForgetWorker(worker, self._run.training.book.doubtful(worker) if self._run else ()))
        if self._planner.dataset is not None:
            self._planner.dataset.forget(worker)
        self._epochs.advance()

    def forgotten(self, worker: str, applied: Sequence[Collection[int]]) -> None:
        """Record the answer to ForgetWorker: no shard applies anything more of the worker.

        Args:
            worker: The worker.
            applied: For each shard, those of the worker's tasks that it has applied.
        """
        if self._run and self._run.training.book.resolve(worker, applied):
            self._effects.useful(self._clock.now(), self.epoch, self._run.training)
        self._epochs.advance()

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
        return self._decisions.plan.look_at_groups(self._members.ready_names(), load, remaining_s, machines)

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue the job after :meth:`retire_all` with another preset and the workers of the specification."""
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
            return self._epochs.ended or Wait()
        if report:
            member.in_flight = report.in_flight
        if report and report.supply and self._planner.dataset is not None:
            self._planner.dataset.report(worker, report.supply)
        if self._run and report and self._run.current.absorb(member, report, now):
            training = self._run.current if isinstance(self._run.current, TrainingPhase) else None
            self._effects.useful(now, self.epoch, training)
            for kind, data in self._decisions.changes(self._members, now) if training is not None else ():
                self._effects.emit(kind, **data)
        self._epochs.advance()
        if self._epochs.ended:
            member.released = True
            return self._epochs.ended
        if self._run is None or self._epochs.suspended:
            return Wait()
        return self._run.current.instruct(member, now)

    def take_rows(self, worker: str, iteration: int, pass_index: int, number: int) -> RowSplit | None:
        """Give a worker rows of a dataset that workers run; None: no rows are left for it."""
        dataset = self._planner.dataset
        if dataset is None or self._epochs.ended or self._members.get(worker) is None:
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
        self._epochs.advance()

    def replaced(self) -> None:
        """Make the workers of a paused epoch continue with the shared state, which was replaced."""
        if self._run and self.standing:
            self._run.training.replaced(self.merger.encoded)

    def stop_training(self) -> None:
        """End cleanly: drop unleased tasks, complete leased ones, then end the epoch and the job."""
        self._epochs.stop()

    def fed(self, epoch: int, data: bytes, samples: int) -> None:
        """Queue one more batch of a stream; drop it if its epoch accepts no more batches.

        Raises:
            ProtocolError: The client sent more batches than it had credit for.
        """
        if epoch == self.epoch:
            self._epochs.fed(data, samples)

    def feed_ended(self, epoch: int) -> None:
        """Record that the client's iterator has no more batches for this epoch."""
        if epoch == self.epoch:
            self._epochs.feed_ended()

    def has_room(self, epoch: int, size: int) -> bool:
        """Whether there is room for another batch of a stream of ``size`` bytes, or no need for it."""
        return epoch != self.epoch or self._epochs.has_room(size)

    @property
    def wants_snapshot(self) -> bool:
        """Whether a snapshot of the shards would make room for batches of the client, which waits."""
        return self._epochs.wants_snapshot

    @property
    def feed_credit(self) -> FeedCredit:
        """Credit of the client for the current epoch; zero while the epoch accepts no batches."""
        return self._epochs.feed_credit

    # ---- server

    def release(self) -> None:
        """Let the next epoch begin once the client permits it; only for a coordinator that is ``held``."""
        self._gate.release()
        self._epochs.advance()

    def flushed(self, epoch: int) -> None:
        """Record the answer to FlushShards: a stored snapshot contains every push of this epoch.

        Each effect is answered once. An answer to one from before a loss of the shards does not count.
        """
        if self._run and epoch == self.epoch:
            self._run.flushed()
            self._epochs.advance()

    def fail(self, reason: str) -> None:
        """End the job as failed; do nothing once it has ended."""
        self._epochs.fail(reason)

    def tick(self) -> None:
        """Check the timeouts: silent workers, a job without workers, stalls."""
        now, spec = self._clock.now(), self._planner.spec
        if not self._epochs.ended and not self._epochs.suspended:
            for member in self._members.silent(now, spec.step_timeout_s):
                reason = f"it was silent for more than {spec.step_timeout_s:g} s"
                self._effects.add(GiveUp(member.name, reason))
                self.left(member.name, reason)
            if (failure := self._members.failure(now, spec.start_timeout_s)) is not None:
                self.fail(failure)
            self._epochs.advance()
        if not self._epochs.ended:
            self._effects.stall(now, self.waiting_for())

    def drain(self) -> list[Effect]:
        """Return the effects since the last call, in order."""
        return self._effects.drain()

    @property
    def handed_out(self) -> bool:
        """Whether every task of the epoch is leased: waiting workers keep waiting until one is returned."""
        return self._run is not None and self._run.handed_out

    def waiting_for(self) -> tuple[str, ...]:
        """Return the causes of the wait: names of workers, or "client", "shards", "workers"."""
        return self._epochs.waiting_for()

    def speeds(self) -> dict[str, dict[str, Any]]:
        """Return each worker's last known speed: samples per second, seconds per step and per exchange, batch size."""
        return self._decisions.report.described
