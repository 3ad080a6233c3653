"""One simulated job: the real coordinator and shards, simulated workers, and what a client may ask of it.

It does what :class:`nfdt.jobserver.job.Job` does with threads and processes. Nothing happens by itself: virtual
time passes while :meth:`SimulatedJob.events` is iterated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.topology_view import view_of
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.errors import JobFailed
from nfdt.core.events import Event
from nfdt.core.program.state import State, load_state
from nfdt.core.sharding import count_shards
from nfdt.core.specs.job import JobSpec
from nfdt.core.work import instructions as ins
from nfdt.simulate.attendance import Attendance
from nfdt.simulate.client import VirtualClient, Way
from nfdt.simulate.cluster import ClusterDescription
from nfdt.simulate.crews import Crews, simulated
from nfdt.simulate.events import Agenda, Signal
from nfdt.simulate.machines import Machine, Network
from nfdt.simulate.record import Record
from nfdt.simulate.regrouping import Regrouping
from nfdt.simulate.shards import LocalShards
from nfdt.simulate.trainer import Read, Trainer
from nfdt.simulate.worker import Post, SimulatedWorker
from nfdt.transport.base import Pushed
from nfdt.transport.choice import make_choice

RESULT = "result"

Batch = tuple[bytes, int]
"""Of a stream: the encoded batch and its samples."""


class SimulatedJob:
    """A job on a described cluster; has the methods that a client uses of a real one.

    Args:
        spec: The job; how many workers and shards there are is the cluster's to say.
        manifest: Its program.
        read: Returns an artifact's bytes by its sha256.
        cluster: The machines and links.
        trainer: Of an earlier job of the same program and data, whose compiled steps are used again.

    Attributes:
        job_id: A name.
        record: What happened so far.
        agenda: The virtual clock.
        trainer: The model that the workers share.
        shards: The real stores.
    """

    job_id = "simulated"

    def __init__(
        self,
        spec: JobSpec,
        manifest: Mapping[str, Any],
        read: Read,
        cluster: ClusterDescription,
        trainer: Trainer | None = None,
    ) -> None:
        self.agenda, self.record = Agenda(), Record()
        spec = simulated(spec, cluster.count, cluster.shards.count)
        self._events: list[Event] = []
        self.trainer = trainer or Trainer(spec, manifest, read)
        self.trainer.begin(spec)
        state = load_state(read(manifest["state"]))
        rules = [{"rule": entry["rule"], "decay": entry.get("decay")} for entry in manifest["untrained"]]
        self._merger = StateMerger(rules, [state.untrained[i] for i in range(len(rules))])
        machines = [Machine(i, w, spec.fit.batch_size, cluster.seed) for i, w in enumerate(cluster.each())]
        self._network = Network(cluster, count_shards(manifest, spec.cluster.shards), ring=not view_of(spec).pushes)
        self._crews = Crews(spec, machines, self._network, self.trainer.layout.size)
        self.shards = LocalShards(spec, manifest, state, len(self._crews.posts))
        clock = self.agenda.clock
        self.coordinator = Coordinator(self._crews.seen, self._crews.policy, clock, self._merger, self._crews.sizes)
        self._attendance = Attendance(self.agenda, self.coordinator, self._worker, self._stir)
        # Whether all who wait for tasks wait for the same: for any task to come back, the round's end, or the slowest.
        policies = {"dynamic": ("free", "softsync", "bsp", "ssp"), "finish-together": ()}
        self._alike = self._crews.policy.name in policies.get(spec.algorithm.tasks, ("free", "softsync", "bsp"))
        self._waiting: dict[str, Signal] = {}
        self._settling = self._over = False
        self._fed: tuple[int, Iterator[Batch]] | None = None
        self._permitted = spec.fit.initial_epoch - 1
        self._regrouping = Regrouping(
            self.agenda, self.coordinator, self._crews, self._attendance, self._network, self._emit
        )
        self._regrouping.seat("as described")
        self._stir()

    @property
    def spec(self) -> JobSpec:
        """The job as it is now; flat workers may have become groups."""
        return self._crews.spec

    # ---- a client's side

    def events(self) -> Iterator[Event]:
        """All events of the job until its end; virtual time passes between them.

        Raises:
            JobFailed: nothing can happen any more.
        """
        seen = 0
        while True:
            while seen < len(self._events):
                yield self._events[seen]
                seen += 1
            if self._over:
                return
            if not self.agenda.step():
                self._tell_stuck()

    def run(self) -> Record:
        """To the end, with nobody who looks on.

        Raises:
            JobFailed: the job failed.
        """
        self.proceed(self.spec.fit.epochs)
        for event in self.events():
            if event.kind == "state" and event.data["state"] == "failed":
                raise JobFailed(str(event.data["reason"]))
        return self.record

    def proceed(self, epoch: int, until: None = None) -> None:
        """Let this epoch begin; it does not stand still before its end."""
        self._permitted = max(self._permitted, epoch)
        self._stir()

    def feed(self, epoch: int, batches: Iterator[Batch]) -> None:
        """Where the batches of this epoch come from, for a job whose data are a stream."""
        self._fed = (epoch, batches)
        self._stir()

    def stop_training(self) -> None:
        """Finish now; the job succeeds."""
        self.coordinator.stop_training()
        self._stir()

    def set_learning_rate(self, value: float) -> None:
        """From the next update on."""
        self.shards.set_learning_rate(value)

    def set_state(self, state: State) -> None:
        """Go on from other weights, optimizer and untrained variables; between epochs only."""
        self.shards.write(state)
        if state.untrained:
            self._merger.replace([state.untrained[i] for i in range(len(state.untrained))])

    def snapshot(self) -> State:
        """The state as it is."""
        state = self.shards.read()
        untrained = dict(enumerate(self._merger.current))
        return State(state.weights, state.optimizer, untrained, self._merger.metrics)

    def fetch(self, artifact: str) -> State:
        """The state, whatever it is called."""
        return self.snapshot()

    def result_artifact(self) -> str:
        """A name for the result."""
        return RESULT

    def cancel(self, reason: str) -> None:
        """Nothing happens any more."""
        self._over = True

    # ---- workers

    def _worker(self, name: str, index: int, post: Post) -> SimulatedWorker:
        algorithm, clock = self.spec.algorithm, self.agenda.clock.now
        up, down = self._network.roads(post.crew.machines[0].described)
        way = Way(self.agenda, self._network, up, down)
        choice = make_choice(algorithm, self.trainer.layout.size, clock=clock)
        stores: Any = self.shards.stores
        client = VirtualClient(stores, self.shards.layout, name, way, overlap=algorithm.overlap, choice=choice)
        return SimulatedWorker(self.spec, name, index, post, self.trainer, client, self._ask, self, clock)

    def applied(self, worker: str, task: int, pushed: Pushed) -> None:
        """See :class:`nfdt.simulate.worker.Listener`."""
        self.record.applied(worker, task, pushed)

    def member_stepped(self, machine: int, samples: int, seconds: float) -> None:
        """See :class:`nfdt.simulate.worker.Listener`."""
        self.record.member_stepped(machine, samples, seconds)
        self._crews.member_stepped(machine, samples, seconds)

    def _ask(self, name: str, report: ins.Report) -> ins.Instruction | Signal:
        told = self.coordinator.next(name, report)
        self._stir()
        if not isinstance(told, ins.Wait) or report.in_flight:  # who can report more does so first
            return told
        signal = self._waiting[name] = Signal(self.agenda)
        return signal

    # ---- the coordinator's wishes

    def _stir(self) -> None:
        """Something has changed: carry out what follows before anything else happens, but not in the middle of it."""
        if not self._settling:
            self._settling = True
            self.agenda.after(0.0, self._settle)

    def _settle(self) -> None:
        self._settling = False
        while not self._over:
            effects = self.coordinator.drain()
            for effect in effects:
                self._carry_out(effect)
            self._pump()
            ready = self.coordinator.phase == "hold" and self._permitted >= self.coordinator.epoch
            if ready and not effects:
                self.coordinator.proceed(self.coordinator.epoch)
            if not effects and not self._told_waiting():
                return

    def _pump(self) -> None:
        """Hand on as many batches of a stream as there is room for."""
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

    def _told_waiting(self) -> bool:
        """Whether somebody who waits was told something else."""
        news, alike = False, self.coordinator.handed_out or (self._alike and self.coordinator.phase == "train")
        for name, signal in list(self._waiting.items()):
            told = self.coordinator.next(name)
            if not isinstance(told, ins.Wait):
                del self._waiting[name]
                signal.fire(told)
                news = True
            elif alike:
                break
        return news

    def _carry_out(self, effect: ins.Effect) -> None:
        match effect:
            case ins.Emit(kind, data):
                self._emit(kind, data)
            case ins.FlushShards(epoch):
                self.shards.flush()
                self.coordinator.flushed(epoch)
            case ins.ForgetWorker(worker):
                self._waiting.pop(worker, None)
                self.shards.forget(worker)
            case ins.GiveUp(worker, reason):
                self._attendance.lose(worker, reason)
            case ins.EpochDone():
                self._regrouping.review()
            case ins.Failed(reason):
                self._end("failed", reason)
            case ins.TrainingDone():
                self._emit("result", {"artifact": RESULT, "workers": self._statistics()})
                self._end("succeeded", None)

    def _emit(self, kind: str, data: Mapping[str, Any]) -> None:
        now = self.agenda.clock.now()
        if kind == "progress":
            self.record.progressed(now, data)
        elif kind == "epoch_end":
            self.record.epoch_ended(now, data)
        elif kind == "groups":
            self.record.grouped(now, data)
        self._events.append(Event(len(self._events) + 1, now, kind, dict(data)))  # type: ignore[arg-type]

    def _end(self, state: str, reason: str | None) -> None:
        self._emit("state", {"state": state, "reason": reason, "error": None})
        self._over = True

    def _statistics(self) -> dict[str, dict[str, Any]]:
        speeds, codec = self.coordinator.speeds(), self.spec.algorithm.codec
        return {
            name: {**json.loads(worker.statistics.to_json(worker.client, codec)), **speeds.get(name, {})}
            for name, worker in self._attendance.everybody.items()
        }

    def _tell_stuck(self) -> None:
        waiting = ", ".join(self.coordinator.waiting_for()) or "nobody"
        raise JobFailed(
            f"The simulation cannot go on at {self.agenda.clock.now():.3f} virtual seconds, in phase "
            f"{self.coordinator.phase}: it waits for {waiting}."
        )
