"""A real job of the server, whose slots, shards, workers, clients and threads take turns as a test decides.

The weights of the shards count how often each row of each epoch was applied: a judge that trusts no bookkeeping.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from nfdt.core.arrays.safetensors_io import dump_arrays, load_arrays
from nfdt.core.errors import NfdtError, ServerUnreachable
from nfdt.core.jobs.admission import read_manifest
from nfdt.core.jobs.artifacts import ArtifactStore
from nfdt.core.jobs.job_record import is_terminal
from nfdt.core.jobs.store import JobStore
from nfdt.core.sharding.records import join_records, part_of_records
from nfdt.core.specs.job import JobSpec, parse_job
from nfdt.core.wire import jobs_pb2
from nfdt.core.wire import workers_pb2 as pb
from nfdt.core.work.tasks import TaskNumbers
from nfdt.jobserver.context import ServerContext
from nfdt.jobserver.incoming_state import Rest
from nfdt.jobserver.job import Job
from nfdt.jobserver.restart import requeue
from nfdt.jobserver.shard_clients import ShardSnapshot
from nfdt.jobserver.slot_pool import SlotPool
from nfdt.model.program.state import dump_state, load_state
from tests.support.clocks import ManualClock
from tests.support.fakes import VERSIONS
from tests.support.saved_state import store_snapshot, store_state
from tests.support.turns import TurnLock, Turns

JOB, SHARDS, WORKERS, BATCH, EPOCHS = "job-1", 2, 2, 4, 2
GRACE_S = 10.0


class Shard:
    """Applied tasks, and how often each row is applied."""

    def __init__(self, weights: np.ndarray, records: dict[str, np.ndarray]) -> None:
        self.weights, self.alive = weights.copy(), True
        self.tasks = TaskNumbers(records.get("tasks", ()))
        self.closed_round = int(records.get("mode/closed_round", 0))
        self.parts: dict[int, slice] = {}
        self.refused: set[str] = set()

    def push(self, worker: str, task: pb.Task, rows: slice) -> None:
        if worker in self.refused:
            return
        if not task.round:
            if task.task not in self.tasks:
                self.tasks.add(task.task)
                self.weights[rows] += 1
        elif task.round > self.closed_round:
            assert task.round == self.closed_round + 1
            self.parts.setdefault(task.part, rows)
            if len(self.parts) == task.parts:
                for part in self.parts.values():
                    self.weights[part] += 1
                self.parts, self.closed_round = {}, task.round

    def records(self) -> dict[str, np.ndarray]:
        assert not self.parts, "a snapshot of an open round"
        numbers = {"version": np.array(1), "mode/closed_round": np.array(self.closed_round)}
        return {**numbers, "tasks": self.tasks.to_array()}


class ShardsClient:
    """Client of all shards; each call gives way first, and fails once one of them is lost."""

    def __init__(self, turns: Turns, shards: Sequence[Shard]) -> None:
        self._turns, self._shards, self._closed = turns, shards, False

    def _call(self) -> Sequence[Shard]:
        self._turns.give_way()
        if self._closed or not all(shard.alive for shard in self._shards):
            raise ServerUnreachable("A shard does not answer.")
        return self._shards

    def close(self) -> None:
        self._closed = True

    def flush(self) -> None:
        self._call()

    def set_learning_rate(self, value: float) -> None:
        self._call()

    def keep(self, kept: bool) -> None:
        self._call()

    def forget(self, worker: str, tasks: Sequence[int]) -> list[frozenset[int]]:
        applied = []
        for shard in self._call():
            shard.refused.add(worker)
            applied.append(frozenset(task for task in tasks if task in shard.tasks))
        return applied

    def statistics(self) -> list[dict]:
        return [{} for _ in self._call()]

    def save(self, artifacts: ArtifactStore, rest: Rest, *, weights_only: bool = False) -> str:
        return store_state(artifacts, self._call()[0].weights.copy(), rest)

    def snapshot(self, copied: Callable[[], None], artifacts: ArtifactStore, rest: Rest) -> ShardSnapshot:
        try:
            shards = self._call()
            weights = [shard.weights.copy() for shard in shards]
            records = [shard.records() for shard in shards]
        finally:
            copied()
        for _ in range(4):  # the transfer, while workers go on
            self._call()
        tasks = tuple(TaskNumbers(each["tasks"]) for each in records)
        rounds = tuple(int(each["mode/closed_round"]) for each in records)
        if not rounds[0]:  # each shard has its own moment, and its own part of the weights
            records = [{**each, "counts": own} for each, own in zip(records, weights, strict=True)]
        return store_snapshot(artifacts, weights[0], rest, join_records(records), tasks, rounds)


class Process:
    """Slot process: it handles its assignments, and as a worker one instruction at a time."""

    def __init__(self, world: World, role: str, name: str) -> None:
        self.world, self.role, self.alive = world, role, True
        self.slot = world.pool.join(pb.SlotHello(name=name, role=role, host="host", pid=1, versions=VERSIONS)).slot
        self.shard: Shard | None = None
        self.work: pb.WorkerAssignment | None = None
        self.ends_at = float("inf")
        self.refresh()

    def refresh(self) -> None:
        self.instruction: pb.NextReply | None = None
        self.report = pb.NextRequest()
        self.halves: list[tuple[pb.Task, int]] = []  # pushes that are left: task, shard
        self.epoch = self.steps = 0

    def lose(self) -> None:
        self.alive = False
        if self.shard is not None:
            self.shard.alive = False
        self.world.pool.leave(self.slot)

    def drain(self) -> None:
        """Announce the end of the process, which goes on for a while."""
        self.ends_at = self.world.clock.now() + GRACE_S
        self.send(draining=pb.SlotDraining(grace_s=GRACE_S))

    def send(self, **message) -> None:
        self.world.pool.receive(self.slot, pb.SlotMessage(**message))

    def step(self) -> None:
        if self.alive and self.world.clock.now() >= self.ends_at:
            self.lose()
        if not self.alive:
            return
        kept = self.slot.to_send._kept
        if kept:
            assignment = kept[0]
            self.slot.to_send.acknowledge(assignment.number)
            self._take(assignment)
        elif self.work is not None:
            self._train()

    def _take(self, assignment: pb.Assignment) -> None:
        match assignment.WhichOneof("assignment"):
            case "shard":
                if self.shard is not None:
                    self.shard.alive = False
                address = f"127.0.0.1:{next(self.world.ports)}"
                self.shard = self.world.shards[address] = self.world.shard_of(assignment.shard)
                place = {"address": address, "incarnation": assignment.shard.incarnation}
                self.send(ready=pb.SlotReady(job_id=assignment.shard.job_id, **place))
            case "worker":
                self.refresh()
                self.work, self.shards = assignment.worker, list(assignment.worker.shards)
                self.incarnation = assignment.worker.incarnation
            case "release":
                if self.shard is not None:
                    self.shard.alive = False
                self.shard = self.work = None
                self.send(finished=pb.SlotFinished(job_id=assignment.release.job_id))
            case "dismiss":
                self.lose()

    def _train(self) -> None:
        if self.halves:
            self._push()
        elif self.instruction is None:
            self._ask()
        else:
            instruction, self.instruction = self.instruction, None
            self._do(instruction)

    def _ask(self) -> None:
        report, self.report = self.report, pb.NextRequest()
        report.job_id, report.worker, report.job_token = JOB, self.work.worker, self.work.job_token
        report.incarnation = self.incarnation
        self.instruction = self.world.job.workers.next(report, lambda: True)

    def _do(self, reply: pb.NextReply) -> None:
        kind = reply.WhichOneof("instruction")
        instruction = getattr(reply, kind)
        match kind:
            case "begin_epoch":
                self.epoch, self.steps = instruction.epoch, 0
            case "work":
                self.halves = [(task, shard) for task in instruction.tasks for shard in range(SHARDS)]
            case "collect_state":
                state = {"epoch": instruction.epoch, "steps": self.steps, "metrics": dump_arrays({"n": np.ones(1)})}
                self.report.epoch_state.CopyFrom(pb.EpochState(**state))
            case "summarise":
                self.report.summary_json = json.dumps({"logs": {"loss": 1.0}, "val_logs": None, "decision": None})
            case "move_shards":
                self.incarnation, self.shards = instruction.incarnation, list(instruction.shards)
                self.report = pb.NextRequest()
            case "leave":
                self.work = None
                self.send(finished=pb.SlotFinished(job_id=JOB))

    def _push(self) -> None:
        task, number = self.halves.pop(0)
        shard = self.world.shards[self.shards[number]]
        if not shard.alive:  # it waits for its successors, which do not need the rest
            self.halves, self.report = [], pb.NextRequest()
            return
        first = getattr(task, "pass") * self.world.samples
        shard.push(self.work.worker, task, slice(first + task.start, first + task.stop))
        if number == SHARDS - 1:
            self.steps += 1
            self.report.epoch, self.report.logs["loss"] = self.epoch, 1.0
            self.report.finished.add(task=task.task, samples=task.stop - task.start)


class World:
    """Server, job and processes of one test."""

    def __init__(self, folder: Path, monkeypatch, algorithm: dict, *, attended: bool = False) -> None:
        self.clock, self.turns, self.samples, self.attended = ManualClock(), Turns(), 48, attended
        self.artifacts, self.store = ArtifactStore(folder / "artifacts"), JobStore(folder / "jobs.sqlite")
        self.shards: dict[str, Shard] = {}
        self.ports, self.names = itertools.count(1), itertools.count()
        monkeypatch.setattr("nfdt.jobserver.job_core.Mailbox", lambda clock: self.turns.mailbox(clock))
        connect = "nfdt.jobserver.job_parts.connect_shards"
        monkeypatch.setattr(connect, lambda addresses, *_, **__: self._client(addresses))
        monkeypatch.setattr("nfdt.jobserver.topologies.failover.RETRY_S", 0.0)
        monkeypatch.setattr("nfdt.jobserver.job_core.threading", SimpleNamespace(Lock=lambda: TurnLock(self.turns)))
        self.store.add(JOB, self._spec(algorithm).model_dump_json(), session="s", owner="")
        self._start_server()

    def _spec(self, algorithm: dict) -> JobSpec:
        weights = np.zeros(EPOCHS * self.samples, np.float32)
        state, data = self.artifacts.put(dump_state(weights, {}, {})), self.artifacts.put(b"rows")
        manifest = {
            "kind": "config",
            "layout": [["counts", [len(weights)]]],
            "untrained": [],
            "optimizer": {"config": {}},
            "optimizer_variables": [],
            "elementwise": True,
            "state": state,
            "code": None,
        }
        program = self.artifacts.put(json.dumps(manifest).encode())
        spec = {
            "program": program,
            "artifacts": [program, state],
            "algorithm": algorithm,
            "cluster": {"workers": WORKERS, "shards": SHARDS, "snapshot_s": 0.5},
            "fit": {"epochs": EPOCHS, "batch_size": BATCH},
            "train": {"kind": "arrays", "structure": 0, "arrays": [data], "samples": self.samples},
            "attended": self.attended,
            "versions": VERSIONS,
        }
        return parse_job(json.dumps(spec))

    def _start_server(self) -> None:
        self.pool = SlotPool()
        server = ServerContext(self.store, self.artifacts, self.pool, clock=self.clock)
        self.processes: list[Process] = []
        self.control, self.begun = None, False
        self._queue(server)
        for role, count in (("shard", SHARDS), ("worker", WORKERS)):
            for _ in range(count):
                self.add(role)

    def _queue(self, server: ServerContext) -> None:
        self.server, self.begun = server, False
        self.job = Job(server, JOB, parse_job(self.store.get(JOB).spec_json), "s", self.control)

    def _client(self, addresses: Sequence[str]) -> ShardsClient:
        return ShardsClient(self.turns, [self.shards[address] for address in addresses])

    def shard_of(self, assignment: pb.ShardAssignment) -> Shard:
        spec = parse_job(assignment.spec_json)
        state = assignment.state or read_manifest(spec, self.artifacts).state
        records: dict[str, np.ndarray] = {}
        if assignment.records:
            found = load_arrays(self.artifacts.path(assignment.records).read_bytes())
            records = part_of_records(found, assignment.index)
        weights = records.get("counts", load_state(self.artifacts.path(state)).weights)
        return Shard(weights, records)

    # ---- events

    def add(self, role: str) -> None:
        self.processes.append(Process(self, role, f"{role}-{next(self.names)}"))

    def living(self, role: str) -> list[Process]:
        self.processes = [process for process in self.processes if process.alive]
        return [process for process in self.processes if process.role == role and not process.slot.dismissed]

    def begin(self) -> None:
        """Begin the job if its slots are free, as the scheduler does; take up a run that was broken off."""
        if self.begun and not self.ended and not self.turns.lives(JOB):
            if self.job.broken_off and self._goes_on(self.job.broken_off):
                self.control = self.job.core.control
                self._queue(self.server)
        slots = self.job.core.slots
        free = {role: self.pool.attending(role)[1] for role in ("shard", "worker")}
        if not self.begun and not self.ended and free["shard"] >= SHARDS and free["worker"] >= 1:
            slots.evict_other_sessions()
            self.job.acquire(SHARDS, WORKERS)
            self.turns.start(self.job._run, JOB)
            self.begun = True

    def _goes_on(self, why: str) -> bool:
        return requeue(self.store.get(JOB), self.store, self.artifacts, why)

    def permit(self, epoch: int, until: int) -> None:
        """Let an epoch begin or go on up to a step; 0: to its end."""
        self.request(proceed=jobs_pb2.Proceed(epoch=epoch, until=until))

    def snapshot(self) -> None:
        self._client_calls(partial(self.job.clients.snapshot, jobs_pb2.SnapshotRequest.EVERYTHING))

    def request(self, **action) -> None:
        self._client_calls(partial(self.job.clients.control, jobs_pb2.ControlRequest(job_id=JOB, **action)))

    def _client_calls(self, call: Callable[[], object]) -> None:
        def make() -> None:
            with contextlib.suppress(NfdtError):
                call()

        self.turns.start(make, "client")

    def restart_server(self, *, killed: bool) -> None:
        """Stop the server in order, or kill it: its threads never go on. Another one takes the job up."""
        if self.ended:
            return
        if not killed:
            self.turns.start(self.job.store_progress, "progress")
            self._until(lambda: not self.turns.lives("progress"))
            self.job.stop_with_server()
            self._until(lambda: not self.turns.lives(JOB))
        for process in self.processes:
            process.alive = False
            if process.shard is not None:
                process.shard.alive = False
        self.turns.park()
        if not self.ended and self._goes_on("the server was restarted"):
            self._start_server()

    # ---- the end

    @property
    def ended(self) -> bool:
        return is_terminal(self.store.get(JOB).state)

    def _until(self, done: Callable[[], bool], rounds: int = 3000) -> None:
        """Let everybody go on in turn, with slots for all, until something is done."""
        for _ in range(rounds):
            if done():
                return
            self.begin()
            if self.attended:
                self.permit(EPOCHS, 0)
            for role, count in (("shard", SHARDS), ("worker", WORKERS)):
                if len(self.living(role)) < count:
                    self.add(role)
            self.go_on(1)
        raise AssertionError(f"The job hangs in state {self.store.get(JOB).state}, {self.turns.threads}.")

    def go_on(self, rounds: int) -> None:
        """Let everybody that is there go on in turn."""
        for _ in range(rounds):
            for process in list(self.processes):
                process.step()
            for thread in list(self.turns.threads):
                if thread in self.turns.threads:
                    self.turns.run(self.turns.threads.index(thread))
            self.clock.advance(0.3)

    def finish(self) -> str:
        """Let the job end; return its state."""
        self._until(lambda: self.ended)
        return self.store.get(JOB).state

    def applied(self) -> np.ndarray:
        """Return how often each row is applied in the result of the job, by epoch."""
        weights = load_state(self.artifacts.path(self.store.get(JOB).result_artifact)).weights
        return weights.reshape(EPOCHS, self.samples)

    def close(self) -> None:
        self.turns.close()
        self.store.close()
