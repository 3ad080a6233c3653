"""One simulated job: the real coordinator and shards, simulated workers, and the methods for its client.

It is the counterpart of :mod:`nfdt.jobserver.job` without threads and processes. Virtual time passes only while
:meth:`SimulatedJob.events` is iterated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import view_of
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.errors import JobFailed
from nfdt.core.events import Event
from nfdt.core.sharding import count_shards
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.core.work.instructions import carry_out
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import Contents, State, load_state
from nfdt.simulate.cluster import ClusterDescription
from nfdt.simulate.events import Agenda, Signal
from nfdt.simulate.local_steps import LocalStepWorker
from nfdt.simulate.machines import Machine, Post, VirtualNetwork
from nfdt.simulate.post_plan import PostPlan, simulated
from nfdt.simulate.record import Record
from nfdt.simulate.roster import WaitingWorkers, WorkerRoster
from nfdt.simulate.shards import LocalShards
from nfdt.simulate.trainer import Read, Trainer
from nfdt.simulate.worker import SimulatedWorker, VirtualClient
from nfdt.transport.choice import make_choice

RESULT = "result"

EncodedBatch = tuple[bytes, int]
"""A batch of a stream, encoded, and its number of samples."""


class SimulatedJob:
    """A job on a described cluster, with the methods that a client uses of a real job, and those for the effects.

    Args:
        spec: The job; its numbers of workers and shards are replaced by those of the cluster.
        manifest: Its program.
        read: Returns an artifact's bytes by its sha256.
        cluster: The machines and links.
        trainer: Trainer of an earlier job of the same program and data, which has ended; what it compiled is reused.

    Attributes:
        job_id: A name.
        replayed: Number of events from before this client.
        manifest: None, as no server has the tables of the program.
        record: Measurements so far.
        agenda: The virtual clock.
        trainer: The model that the workers share.
        shards: The real stores.
    """

    job_id, replayed = "simulated", 0
    manifest: Manifest | None = None

    def __init__(
        self,
        spec: JobSpec,
        manifest: Manifest,
        read: Read,
        cluster: ClusterDescription,
        trainer: Trainer | None = None,
    ) -> None:
        self.agenda, self.record = Agenda(), Record()
        spec = simulated(spec, cluster.count, cluster.shards.count)
        self.trainer = trainer or Trainer(spec, manifest, read)
        self.trainer.begin(spec)
        state = load_state(read(manifest.state))
        rules = manifest.untrained_rules
        self._merger = StateMerger(rules, [state.untrained[i] for i in range(len(rules))])
        machines = [Machine(i, w, spec.fit.batch_size, cluster.seed) for i, w in enumerate(cluster.each())]
        count = count_shards(manifest, spec.cluster.shards)
        self._network = VirtualNetwork(cluster, count, ring=not view_of(spec).pushes)
        self._post_plan = PostPlan(spec, machines, self._network, self.trainer.layout.size)
        self.shards = LocalShards(spec, manifest, state, len(self._post_plan.posts), self.trainer.engines)
        policy = view_of(self.spec).policy(self.spec)
        self.coordinator = Coordinator(
            self._post_plan.seen, policy, self.agenda, self._merger, self._post_plan.sizes, held=True
        )
        self._roster = WorkerRoster(
            self.agenda, self.coordinator, self._post_plan, self._network, self._worker, self._stir, self.emit
        )
        self._waiting = WaitingWorkers(self.agenda, self.coordinator)
        self._events: list[Event] = []
        self._settling = self._ended = False
        self._fed: tuple[int, Iterator[EncodedBatch]] | None = None
        self._roster.start_all("as described")

    @property
    def spec(self) -> JobSpec:
        """Current specification of the job; flat workers may have become groups."""
        return self._post_plan.spec

    # ---- methods for the client

    def events(self) -> Iterator[Event]:
        """Yield all events of the job until its end; virtual time passes between them.

        Raises:
            JobFailed: no further event is possible.
        """
        seen = 0
        while True:
            while seen < len(self._events):
                yield self._events[seen]
                seen += 1
            if self._ended:
                return
            if not self.agenda.step():
                waiting = ", ".join(self.coordinator.waiting_for()) or "nobody"
                raise JobFailed(
                    f"The simulation cannot go on at {self.agenda.now():.3f} virtual seconds, in phase "
                    f"{self.coordinator.phase}: it waits for {waiting}."
                )

    def run(self) -> Record:
        """Run to the end without a client.

        Raises:
            JobFailed: the job failed.
        """
        self.proceed(self.spec.fit.epochs)
        for event in self.events():
            if event.kind == "state" and event.data["state"] == "failed":
                raise JobFailed(str(event.data["reason"]))
        return self.record

    def proceed(self, epoch: int, until: None = None) -> None:
        """Start this epoch; it does not pause before its end."""
        self.coordinator.proceed(epoch)
        self._stir()

    def feed(self, epoch: int, batches: Iterator[EncodedBatch]) -> None:
        """Set the source of this epoch's batches, for a job whose data are a stream."""
        self._fed = (epoch, batches)
        self._stir()

    def stop_training(self) -> None:
        """Finish the job now; it succeeds."""
        self.coordinator.stop_training()
        self._stir()

    def set_learning_rate(self, value: float) -> None:
        """Set the learning rate from the next update on."""
        self.shards.set_learning_rate(value)

    def set_state(self, parts: Sequence[bytes | memoryview]) -> None:
        """Continue from the state in an artifact, given in parts; between epochs only."""
        state = load_state(b"".join(parts))
        self.shards.write(state)
        if state.untrained:
            self._merger.replace([state.untrained[i] for i in range(len(state.untrained))])

    def snapshot(self, epochs: int = 0, steps: int = 0, contents: Contents = "everything") -> State:
        """Return the current state, whatever is asked for."""
        state = self.shards.read()
        untrained = dict(enumerate(self._merger.current))
        return State(state.weights, state.optimizer, untrained, self._merger.metrics)

    def fetch(self, artifact: str) -> State:
        """Return the current state; ``artifact`` is ignored."""
        return self.snapshot()

    def result_artifact(self) -> str:
        """Return a name for the result."""
        return RESULT

    def worker_statistics(self) -> dict[str, dict[str, Any]]:
        """Return the workers' totals so far."""
        measured, codec = self.coordinator.measured(), self.spec.algorithm.codec
        return {
            name: {**json.loads(worker.statistics.to_json(worker.client, codec)), **measured.get(name, {})}
            for name, worker in self._roster.workers.items()
        }

    def validated(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Do nothing: no other client attaches to the job."""

    def cancel(self, reason: str) -> None:
        """End the job without further events."""
        self._ended = True

    # ---- workers

    def _worker(self, name: str, index: int, post: Post) -> SimulatedWorker:
        algorithm, layout = self.spec.algorithm, self.shards.layout
        roads = self._network.roads(post.machines[0].described)
        choice = make_choice(algorithm, layout.size, clock=self.agenda.now)
        stores: Any = self.shards.stores
        way = self.agenda, self._network, roads
        client = VirtualClient(stores, layout, name, *way, overlap=algorithm.overlap, choice=choice)
        watched = self.record.applied, self._member_stepped, self.agenda
        parts = (self.spec, name, index, post, self.trainer, client, self._ask, *watched)
        return (LocalStepWorker if algorithm.exchange_facts.local else SimulatedWorker)(*parts)

    def _member_stepped(self, machine: int, samples: int, seconds: float) -> None:
        self.record.member_stepped(machine, samples, seconds)
        self._post_plan.member_stepped(machine, samples, seconds)

    def _ask(self, name: str, report: ins.Report) -> ins.Instruction | Signal:
        instruction = self.coordinator.next(name, report)
        self._stir()
        if not isinstance(instruction, ins.Wait) or report.in_flight:
            return instruction  # a worker with pushes in flight reports them first
        return self._waiting.add(name)

    # ---- the coordinator's effects

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append an event and add it to the record."""
        if kind == "epoch_end" and (slow := self.coordinator.slow_links(self._network.load)):
            self.emit("slow_links", slow)
        now = self.agenda.now()
        self.record.observe(now, kind, data)
        self._events.append(Event(len(self._events) + 1, now, kind, dict(data)))  # type: ignore[arg-type]

    def flush_shards(self, epoch: int) -> None:
        """Apply the gradients that the stores hold."""
        self.shards.flush()
        self.coordinator.flushed(epoch)

    def forget_worker(self, worker: str, tasks: Sequence[int]) -> None:
        """Free the state that the stores keep for a lost worker; tasks that they have applied are not done again."""
        self._waiting.remove(worker)
        self.coordinator.forgotten(worker, self.shards.forget(worker, tasks))

    def give_up(self, worker: str, reason: str) -> None:
        """End a worker that sent nothing for too long."""
        self._roster.lose(worker, reason)

    def end_epoch(self, epoch: int, decision: ins.CallbackDecision | None) -> None:
        """Form other workers, if that saves time; simulated jobs have no callbacks on workers."""
        self._roster.regroup()

    def fail(self, reason: str) -> None:
        """End the job as failed."""
        self._end("failed", reason)

    def finish(self) -> None:
        """End the job with its result."""
        self.emit("result", {"artifact": RESULT, "workers": self.worker_statistics()})
        self._end("succeeded", None)

    def _end(self, state: str, reason: str | None) -> None:
        self.emit("state", {"state": state, "reason": reason, "error": None})
        self._ended = True

    def _stir(self) -> None:
        """Schedule the effects of a change before the next event, but not within the current one."""
        if not self._settling:
            self._settling = True
            self.agenda.after(0.0, self._settle)

    def _settle(self) -> None:
        self._settling = False
        while not self._ended:
            effects = self.coordinator.drain()
            for effect in effects:
                carry_out(effect, self)
            self._pump()
            if not effects and self.coordinator.phase == "hold":
                self.coordinator.release()
            if not effects and not self._waiting.wake():
                return

    def _pump(self) -> None:
        """Pass on as many batches of a stream as the coordinator's credit allows."""
        while self._fed is not None and self.coordinator.feed_credit.epoch == self._fed[0]:
            if not self.coordinator.feed_credit.free:
                return
            epoch, batches = self._fed
            batch = next(batches, None)
            if batch is None:
                self._fed = None
                self.coordinator.feed_ended(epoch)
            else:
                self.coordinator.fed(epoch, *batch)
