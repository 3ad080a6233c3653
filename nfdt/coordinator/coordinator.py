"""The state machine of one job: reports and requests go in, instructions and effects come out.

::

    hold ──Proceed, workers ready──> the phases of an epoch (epoch_run.py) ──> hold ... ──> done
                                     train, collect, validate, summarise         fail() ──> failed

It has no thread, lock, socket or wall clock. The servicer serialises the calls, passes reports in and answers with
what :meth:`Coordinator.next` returns. It calls :meth:`Coordinator.tick` several times a second, and carries out the
effects of :meth:`Coordinator.drain` after each call. For a worker whose instruction is Wait it calls
:meth:`Coordinator.next` again, without a report, whenever anything has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nfdt.consistency import ConsistencyPolicy
from nfdt.coordinator.decisions import Decisions, stream_warning
from nfdt.coordinator.effect_queue import EffectQueue
from nfdt.coordinator.epoch_plan import EpochPlanner
from nfdt.coordinator.epoch_run import EpochRun
from nfdt.coordinator.epochs import EpochSequence
from nfdt.coordinator.membership import Member, Membership
from nfdt.coordinator.online_planner import ShardLoad
from nfdt.coordinator.recovery import Recovery
from nfdt.coordinator.training import Gate, TrainingPhase
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.clock import Clock
from nfdt.core.specs.job import JobSpec
from nfdt.core.work.instructions import (
    Effect,
    Evaluate,
    ForgetWorker,
    GiveUp,
    Instruction,
    Leave,
    Report,
    Summarise,
    Wait,
)
from nfdt.planning.cost_model import PlanChoice
from nfdt.schedulers.batch_policies import LocalSizes
from nfdt.schedulers.task_policies import make_task_policy

SUSPECTED_AFTER = 1.15  # intervals between two signs of life


class Coordinator(EpochSequence):
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
        members = Membership(spec.cluster.workers, clock.now())
        planner = EpochPlanner(spec, synchronous=policy.facts.synchronous, restorable=restorable)
        effects = EffectQueue(clock.now())
        gate = Gate(-1 if spec.attended else spec.fit.epochs, held=held)
        if text := stream_warning(spec):
            effects.emit("log", worker=None, level="warning", text=text)
        decisions = Decisions(spec, policy, sizes)
        super().__init__(planner, members, decisions, merger or StateMerger(), gate, effects, clock)
        self.recovery = Recovery(self, planner, members, effects, clock)
        self._alike = make_task_policy(spec.algorithm.tasks).waiters_alike(policy.facts.waiters_alike)

    @property
    def standing(self) -> bool:
        """Whether the epoch is paused for the client; :meth:`proceed` resumes it."""
        return self.run is not None and self._gate.standing

    @property
    def steps_finished(self) -> int:
        """Number of finished steps of the running epoch, also where lost shards went back since then; 0 without one."""
        return max(self.run.training.book.steps_finished, self._gate.paused_at) if self.run else 0

    @property
    def waiting_tasks(self) -> int:
        """Number of tasks of the running epoch that no worker has yet; 0 without one."""
        return self.run.training.book.remaining if self.run else 0

    @property
    def fresh(self) -> bool:
        """Whether nothing of the current epoch is trained yet."""
        return self.run is None or not self.run.training.book.samples_finished

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
        requeued = sum(run.current.lost(worker) for run in self._runs)
        if self.early is not None:
            self.early.lost(worker)
        if not member.released:
            self._effects.emit("worker_lost", worker=worker, reason=reason, requeued=requeued)
        doubtful = [task for run in self._runs for task in run.training.book.doubtful(worker)]
        self._effects.add(ForgetWorker(worker, tuple(doubtful)))
        if self._planner.dataset is not None:
            self._planner.dataset.splits.remove(worker)
        self.advance()

    def forgotten(self, worker: str, applied: Sequence[Collection[int]]) -> None:
        """Record the answer to ForgetWorker: no shard applies anything more of the worker.

        Args:
            worker: The worker.
            applied: For each shard, those of the worker's tasks that it has applied.
        """
        for run in self._runs:
            if run.training.resolve(worker, applied):
                self._effects.progressed(self._clock.now(), self.epoch, run.training if run is self.run else None)
        self.advance()

    def retire_all(self) -> None:
        """Release all workers between two epochs; :meth:`expect` sets the number of their successors."""
        for member in self._members.all():
            self.retire(member.name)

    def retire(self, worker: str) -> None:
        """Release a worker between two epochs."""
        if (member := self._members.get(worker)) is not None:
            member.released = True
            self.left(worker, "others take its place")

    def expect(self, count: int) -> None:
        """Begin the next epoch only when ``count`` workers are ready."""
        self._members.expect(count)

    def slow_links(self, load: ShardLoad) -> dict[str, float] | None:
        """Return the data of ``slow_links`` if the workers of a planning job mostly wait for their links, or None."""
        return self._decisions.slow_links(self._members.ready_names(), load)

    def plan_groups(
        self, load: ShardLoad, remaining_s: float, machines: Mapping[str, str] | None = None
    ) -> PlanChoice | None:
        """Return the groups that a planning job forms of its workers between two epochs, or None.

        ``machines`` has the name of each worker's machine, where it is known.
        """
        return self._decisions.plan.look_at_groups(self._members.ready_names(), load, remaining_s, machines)

    def renew(self, spec: JobSpec, sizes: LocalSizes | None) -> None:
        """Continue the job after :meth:`retire_all` with another preset and the workers of the specification."""
        self._planner.spec = spec
        self.drop_early()
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

    def heard(self, worker: str, silent_s: float) -> None:
        """Record that the process of a worker gave its last sign of life ``silent_s`` seconds ago."""
        if (member := self._members.get(worker)) is not None:
            member.heard_at = self._clock.now() - silent_s

    def plan_with(self, spec: JobSpec) -> None:
        """Change the batch sizes of the epochs that begin from now on."""
        self._planner.spec = spec
        self.drop_early()

    def next(self, worker: str, report: Report | None = None) -> Instruction:
        """Process a worker's report (None: only a new request) and return its next instruction.

        The instruction is complete: a worker that repeats its request before it has executed it gets the same one.
        """
        member = self._members.get(worker)
        if member is None:
            return Leave("This worker is not part of the job (any more).")
        now = member.seen_at = self._clock.now()
        if report:
            member.suspected, member.heard_at = False, None if member.heard_at is None else now
        elif member.suspected:  # nobody may take the answer to the call that waits
            return Wait()
        if not member.ready:
            self._members.set_ready(member)
            self._decisions.joined(worker)
        if report and report.busy:  # a heartbeat: it must not be answered with work, which nobody would execute
            return self.ended or Wait()
        if report:
            member.in_flight, member.early, member.overtaken = report.in_flight, report.early, False
        if report and report.supply and self._planner.dataset is not None:
            self._planner.dataset.report(worker, report.supply)
        if report:
            self._absorb(member, report, now)
        self.advance()
        if self.ended:
            member.released = True
            return self.ended
        return Wait() if self.suspended else self._instruct(member, now)

    @property
    def _runs(self) -> list[EpochRun]:
        """The current epoch and the one that has begun ahead, as far as there are any."""
        return [run for run in (self.run, self.ahead) if run is not None]

    def _absorb(self, member: Member, report: Report, now: float) -> None:
        """Process a report for the current epoch, and for the one that has begun ahead: a worker may report on both."""
        for run in self._runs:
            if not run.current.absorb(member, report, now):
                continue
            training = run.current if isinstance(run.current, TrainingPhase) else None
            self._effects.progressed(now, self.epoch, training if run is self.run else None)
            for kind, data in self._decisions.changes(self._members, now) if training is not None else ():
                self._effects.emit(kind, **data)

    def _instruct(self, member: Member, now: float) -> Instruction:
        """Return what the worker does for the current epoch, or for the one that has begun ahead."""
        for run in self._runs:
            instruction = run.current.instruct(member, now)
            if isinstance(instruction, Evaluate | Summarise):
                return replace(instruction, ahead=self.ahead is not None)
            if not isinstance(instruction, Wait):
                return instruction
        return self.compute_early(member, now)

    def take_rows(self, worker: str, iteration: int, pass_index: int, number: int) -> range | None:
        """Give a worker rows of a dataset that workers run; None: no rows are left for it."""
        dataset = self._planner.dataset
        if dataset is None or self.ended or self._members.get(worker) is None:
            return None
        return dataset.splits.take(worker, iteration, pass_index, number)

    # ---- client

    def proceed(self, epoch: int, until: int | None = None) -> None:
        """Let an epoch begin or resume: the client has received the end of the previous one.

        The epoch pauses after ``until`` of its steps and at its end (None: never), until more steps are permitted.
        """
        self._gate.permit(epoch, until)
        if self.run and epoch == self.epoch:
            self._gate.resume(until)
        self.advance()

    def replaced(self) -> None:
        """Make the workers of a paused epoch continue with the shared state, which was replaced."""
        if self.run and self.standing:
            self.run.training.replaced(self.merger.encoded)

    # ---- server

    def release(self) -> None:
        """Let the next epoch begin once the client permits it; only for a coordinator that is ``held``."""
        self._gate.release()
        self.advance()

    def flushed(self, epoch: int, *, kept: bool = False) -> None:
        """Record the answer to FlushShards: a stored snapshot contains every push of this epoch.

        Each effect is answered once. An answer to one from before a loss of the shards does not count. With ``kept``
        the shards keep the weights of the epoch's end, and workers may train the next epoch meanwhile.
        """
        if self.run and epoch == self.epoch:
            self._may_overlap = self.run.flushed() and kept
            self.advance()

    def tick(self) -> None:
        """Check the timeouts: workers that are overdue or silent, a job without workers, stalls."""
        now, spec = self._clock.now(), self._planner.spec
        if not self.ended and not self.suspended:  # workers have nothing to report while the shards are away
            for member in self._members.silent(now, spec.step_timeout_s):
                reason = f"it was silent for more than {spec.step_timeout_s:g} s"
                self._effects.add(GiveUp(member.name, reason))
                self.left(member.name, reason)
            self._members.suspect(now, SUSPECTED_AFTER * spec.cluster.heartbeat_s)
            if self.run:
                self.run.look(now)
            if (failure := self._members.failure(now, spec.start_timeout_s)) is not None:
                self.fail(failure)
            self.advance()
        if not self.ended:
            self._effects.stall(now, self.waiting_for())

    def drain(self) -> list[Effect]:
        """Return the effects since the last call, in order."""
        return self._effects.drain()

    @property
    def has_effects(self) -> bool:
        """Whether :meth:`drain` would return any effect."""
        return bool(self._effects)

    @property
    def wait_alike(self) -> bool:
        """Whether either all waiting workers may continue or none."""
        return self.handed_out or (self._alike and self.phase == "train")

    @property
    def handed_out(self) -> bool:
        """Whether every task of the epoch is leased: waiting workers keep waiting until one is returned."""
        run = self.run
        return run is not None and run.current is run.training and not run.training.book.remaining

    def measured(self) -> dict[str, dict[str, Any]]:
        """Return of each worker, also lost ones, how much it has trained, and its last known speed.

        ``samples``: Of tasks that it finished, up to the current epoch: one that several workers computed counts once.
        ``samples_per_s``, ``step_s``, ``step_exchange_s`` and ``batch_size`` once they are known.
        """
        trained = self.trained + self.run.training.trained if self.run is not None else self.trained
        described = self._decisions.speeds.described
        return {name: {"samples": count, **described.get(name, {})} for name, count in trained.items()}
