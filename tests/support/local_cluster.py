"""Complete cluster in this process: the real coordinator, workers, shards and transports; threads for processes."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hashlib
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import keras
import numpy as np

from nfdt.consistency import make_policy
from nfdt.coordinator.coordinator import Coordinator
from nfdt.coordinator.untrained import StateMerger
from nfdt.core.arrays.pytree import flatten_structure
from nfdt.core.clock import SystemClock
from nfdt.core.sharding import count_shards, sparse_tables, tables_on_shards
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.wire.job_token import worker_token
from nfdt.core.work.instructions import (
    Emit,
    Failed,
    FlushShards,
    ForgetWorker,
    Leave,
    MoveShards,
    TrainingDone,
    Wait,
)
from nfdt.core.work.messages import to_reply, to_report
from nfdt.core.work.patience import Patience
from nfdt.model.program.pack import pack
from nfdt.model.program.state import load_state
from nfdt.shard.building import build_store
from nfdt.shard.in_process import InProcessClient
from nfdt.shard.servicer import start_shard
from nfdt.transport.choice import make_choice
from nfdt.transport.emulated_link import make_link
from nfdt.transport.stream import StreamClient
from nfdt.worker.movable_client import MovableClient, ShardMoves
from nfdt.worker.worker import Worker

DEADLINE_S = 120.0
TOKEN = "token"


@dataclass
class Outcome:
    """Result of a job: trained weights, one dict of logs per epoch, optimizer variables, bytes sent and received."""

    weights: np.ndarray
    epochs: list[dict] = field(default_factory=list)
    optimizer: dict[int, np.ndarray] = field(default_factory=dict)
    untrained: list[np.ndarray] = field(default_factory=list)
    staleness: list[dict] = field(default_factory=list)
    events: list[tuple[str, dict]] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    speeds: dict[str, dict] = field(default_factory=dict)
    codecs: list[dict] = field(default_factory=list)
    traffic: list[tuple[int, int]] = field(default_factory=list)
    answer: bytes = b""
    artifacts: dict[str, bytes] = field(default_factory=dict)

    def samples_of(self, epoch):
        """Return the samples that each worker reported in the epoch."""
        return Counter({w: sum(d.samples for d in self.done if (d.worker, d.epoch) == (w, epoch)) for w in self.speeds})

    def ends_of(self, epoch):
        """Return the times in seconds at which each worker reported its last task of the epoch."""
        return {d.worker: d.at for d in self.done if d.epoch == epoch}


@dataclass(frozen=True)
class Done:
    """Report of finished tasks."""

    at: float
    worker: str
    epoch: int
    samples: int


def train(
    model,
    x,
    y=None,
    *,
    algorithm,
    workers=1,
    shards=1,
    validation=None,
    overrides=None,
    transport="in_process",
    step_ms=(),
    bandwidth_mbit=(),
    lose=None,
    kept=None,
    method="fit",
    **fit,
) -> Outcome:
    """Train a compiled model's program on a cluster of threads; the model itself stays as it is.

    ``transport`` is ``in_process``, ``stream`` or ``shared_memory``; ``step_ms`` is emulated, and with the last two
    ``bandwidth_mbit``; ``lose`` is ``(worker, step)``: the worker dies after so many steps or evaluated batches, before
    it reports the last ones. ``kept`` holds the programs that the workers have built, by their names, and is brought up
    to date. With another ``method`` than ``fit``, ``x`` is the pytree of the data to evaluate.
    """
    emulate = {"step_ms": step_ms, "bandwidth_mbit": bandwidth_mbit}
    cluster = ClusterSpec(workers=workers, shards=shards, emulate=emulate)
    job = _Job(model, x, y, algorithm, cluster, validation, overrides or {}, lose, fit, transport, method)
    try:
        job.serve()
        return job.run({} if kept is None else kept)
    finally:
        job.close()


class _Job:
    def __init__(self, model, x, y, algorithm, cluster, validation, overrides, lose, fit, transport, method="fit"):
        self.transport = transport
        self.lose, self.steps, self.events, self.done = lose, Counter(), [], []
        self.artifacts, self.arrays = {}, {}
        size = fit.get("batch_size", 32)
        validation = validation if method == "fit" else x
        chosen = resolve_algorithm(algorithm, **overrides)
        batch = _rows(x if y is None else (x, y), size)
        own = {"sparse": chosen.rows} if method == "fit" else {}
        packed = pack(model, batch, predicts=method == "predict", outer=chosen.outer_optimizer, **own)
        self.artifacts.update(packed.artifacts)
        self.manifest = packed.manifest
        self.spec = JobSpec(
            program=self._put(packed.manifest.to_bytes()),
            code=packed.code,
            algorithm=chosen,
            cluster=cluster,
            fit=FitSpec(**{"epochs": 1, "shuffle": False, **fit}),
            method=method,
            train=self._data(x if y is None else (x, y)),
            validation=self._data(validation) if validation else None,
            attended=False,
        )
        self.layout = self.manifest.layout
        self.tables = (
            () if transport == "in_process" else sparse_tables(self.manifest, self.spec.algorithm, cluster.shards)
        )
        self.looked_up = bool(self.tables) and tables_on_shards(self.manifest, self.spec.algorithm, cluster.shards)
        state = load_state(self.artifacts[self.manifest.state])
        self.state, self.running, self.clients = state, [], []
        policy = make_policy(self.spec.algorithm)
        rules = self.manifest.untrained_rules
        merger = StateMerger(rules, [state.untrained[i] for i in range(len(rules))])
        self.coordinator = Coordinator(self.spec, policy, SystemClock(), merger)
        self.changed = threading.Condition()
        self.epochs, self.failure, self.stopped = [], None, threading.Event()

    def _put(self, content: bytes) -> str:
        name = hashlib.sha256(content).hexdigest()
        self.artifacts[name] = content
        return name

    def _read_ranges(self, name, ranges) -> bytes:
        return b"".join([self.artifacts[name][start : start + length] for start, length in ranges])

    def _data(self, tree) -> DataSpec:
        structure, arrays = flatten_structure(tree)
        names = []
        for array in arrays:
            name = self._put(array.tobytes() + str(array.shape).encode())
            self.arrays[name] = array
            names.append(name)
        return DataSpec(kind="arrays", structure=structure, arrays=tuple(names), samples=len(arrays[0]))

    def serve(self) -> None:
        """Start the shards; with ``in_process`` they are only built."""
        cluster, algorithm = self.spec.cluster, self.spec.algorithm
        shards = count_shards(self.manifest, cluster.shards)
        if self.transport != "in_process":
            arguments = (self.manifest, self.state, algorithm)
            options = {"workers": cluster.workers, "token": TOKEN, "leased": False}
            self.running = [start_shard(*arguments, index, cluster.shards, **options) for index in range(shards)]
            self.stores = [shard.store for shard in self.running]
            return
        self.stores = [
            build_store(self.manifest, self.state, algorithm, index, cluster.shards, workers=cluster.workers)
            for index in range(shards)
        ]

    def _client(self, worker):
        algorithm, cluster = self.spec.algorithm, self.spec.cluster
        options = {"overlap": algorithm.overlap, "choice": make_choice(algorithm, self.layout.size)}
        if not self.running:
            self.clients.append(InProcessClient(self.stores, self.layout, worker, **options))
            return self.clients[-1]
        addresses = [shard.address for shard in self.running]
        options |= {"timeout_s": DEADLINE_S, "share_memory": self.transport == "shared_memory", "tables": self.tables}
        options["looked_up"] = self.looked_up
        options["emulated"] = make_link(cluster.emulate, len(self.clients), self.stopped)
        self.clients.append(StreamClient(addresses, self.layout, worker, worker_token(TOKEN, worker), **options))
        return self.clients[-1]

    def _movable(self, client):
        moves = ShardMoves()
        moves.announce(MoveShards("job", 0, (), ""))
        return MovableClient(moves, lambda _: client, lambda: Patience(0.0, self.stopped))

    def close(self) -> None:
        """Disconnect the workers and end the shards."""
        for end in (*(client.close for client in self.clients), *(shard.stop for shard in self.running)):
            end()

    def _settle(self) -> None:
        """Carry out the coordinator's effects; called under the lock."""
        for effect in self.coordinator.drain():
            if isinstance(effect, Emit):
                self.events.append((effect.kind, effect.data))
            match effect:
                case Emit("epoch_end", data):
                    self.epochs.append(data)
                case FlushShards(epoch):
                    for store in self.stores:
                        store.flush()
                    self.coordinator.flushed(epoch)
                    self._settle()
                case ForgetWorker(worker, tasks):
                    self.coordinator.forgotten(worker, [store.forget(worker, tasks) for store in self.stores])
                    self._settle()
                case Failed(reason):
                    self.failure = reason
                case TrainingDone():
                    pass
        self.changed.notify_all()

    def _ask(self, request):
        if self.spec.method == "predict" and request.evaluated.metrics:
            request.evaluated.metrics = self._put(request.evaluated.metrics).encode()
        report = to_report(request)
        with self.changed:
            if self._dies(request):
                self.coordinator.left(request.worker, "killed")
                self._settle()
                return to_reply(Leave("killed"))
            if request.finished:
                samples = sum(task.samples for task in request.finished)
                self.done.append(Done(time.monotonic(), request.worker, request.epoch, samples))
            while True:
                instruction = self.coordinator.next(request.worker, report)
                report, phase = None, self.coordinator.phase
                self._settle()
                if self.coordinator.phase != phase:
                    continue  # the shards are flushed
                if not isinstance(instruction, Wait) or not request.wait_s:
                    return to_reply(instruction)
                assert self.changed.wait(DEADLINE_S), f"{request.worker} waits for {self.coordinator.waiting_for()}"

    def _dies(self, request):
        self.steps[request.worker] += len(request.finished) + len(request.evaluated.tasks)
        return self.lose is not None and request.worker == self.lose[0] and self.steps[request.worker] >= self.lose[1]

    def _work(self, worker: Worker, name: str) -> None:
        try:
            worker.run()
        except Exception as error:
            if self.lose is not None and name == self.lose[0] and self.steps[name] >= self.lose[1]:
                return  # the shards refuse the pushes of a worker that is given up
            with self.changed:
                self.coordinator.fail(f"{name}: {error!r}")
                self.failure = error
                self._settle()

    def run(self, kept) -> Outcome:
        names = [f"worker-{i}" for i in range(self.spec.cluster.workers)]
        workers = [
            Worker(
                self.spec,
                name,
                index,
                self.manifest,
                read=self.artifacts.__getitem__,
                open_array=self.arrays.__getitem__,
                client=self._movable(self._client(name)),
                ask=self._ask,
                stopped=self.stopped,
                tables=self.tables,
                read_ranges=self._read_ranges if self.looked_up else None,
                built=kept.get(name),
            )
            for index, name in enumerate(names)
        ]
        for index, name in enumerate(names):
            self.coordinator.joined(name, index)
        threads = [threading.Thread(target=self._work, args=pair) for pair in zip(workers, names, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), self.coordinator.waiting_for()
        if self.failure:
            raise AssertionError(self.failure)
        kept.update({name: worker.built for worker, name in zip(workers, names, strict=True)})
        parts = [store.read() for store in self.stores]
        optimizer = self._optimizer([variables for _, variables in parts])
        return Outcome(
            np.concatenate([weights for weights, _ in parts]),
            self.epochs,
            optimizer,
            list(self.coordinator.merger.current),
            [store.statistics() for store in self.stores],
            self.events,
            self.done,
            self.coordinator.measured(),
            [client.codecs for client in self.clients],
            [(client.bytes_sent, client.bytes_received) for client in self.clients],
            self.coordinator.merger.metrics,
            self.artifacts,
        )

    def _optimizer(self, parts) -> dict[int, np.ndarray]:
        """Return whole variables; one without parts (iterations) is the same on all shards."""
        found = {}
        for index, described in enumerate(self.manifest.optimizer_variables or []):
            held = [part[index] for part in parts if index in part]
            whole = held[:1] if described["variable"] < 0 else held
            found[index] = np.concatenate([array.reshape(-1) for array in whole]).reshape(described["shape"])
        return found


def _rows(tree, size):
    return keras.tree.map_structure(lambda array: array[:size], tree)


def flat(model) -> np.ndarray:
    """Return the model's trainable variables as a flat array."""
    return np.concatenate([np.asarray(v).reshape(-1) for v in model.trainable_variables])


def clone(build, optimizer):
    """Return a fresh model, with the same weights in each call with the same ``build``."""
    keras.utils.set_random_seed(7)
    return build(optimizer)
