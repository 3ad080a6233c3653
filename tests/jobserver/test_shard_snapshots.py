"""Snapshots of a job's shards over gRPC."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import threading
from contextlib import ExitStack

import grpc
import keras
import numpy as np
import pytest

from nfdt.core.errors import NfdtError, ProtocolError, ServerUnreachable
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.wire import shards_pb2, workers_pb2
from nfdt.jobserver.shard_clients import ShardSnapshot, connect_shards
from nfdt.model.program.manifest import Manifest
from nfdt.model.program.state import State
from nfdt.shard.messages import Gradient
from nfdt.shard.servicer import start_shard
from tests.support.fakes import LAYOUT, WEIGHTS, FakeShard
from tests.support.saved_state import saved, snapshot_of
from tests.support.shard_cluster import Reference, gradients

TIMEOUT_S = 120.0
SHARDS = 2


class Job:
    """Shards of a job in this process, each with a gRPC server of its own."""

    def __init__(self, preset):
        self.reference = Reference(keras.optimizers.Adam(0.01))
        self.manifest, self.algorithm = self.reference.manifest(), resolve_algorithm(preset)
        self._closing = ExitStack()
        self.running = []

    def start(self, state, records=None):
        """Start all shards; return the client."""
        self.running = [
            start_shard(
                self.manifest, state, self.algorithm, i, SHARDS, workers=3, token="t", records=records, leased=False
            )
            for i in range(SHARDS)
        ]
        clients = connect_shards([shard.address for shard in self.running], self.manifest, "t")
        for shard in self.running:
            self._closing.callback(shard.stop)
        self._closing.callback(clients.close)
        return clients

    def push(self, worker, sequence, seed, **fields):
        gradient = gradients(1, seed)[0]
        bounds = np.cumsum([0, *(shard.store.size for shard in self.running)])
        for shard, start, stop in zip(self.running, bounds, bounds[1:], strict=False):
            shard.store.push(worker, Gradient(sequence, gradient[start:stop].copy(), **fields))

    def pull(self, *workers):
        for worker in workers:
            for shard in self.running:
                shard.store.pull(worker)

    def close(self):
        self._closing.close()


@pytest.fixture
def job_of():
    with ExitStack() as closing:

        def make(preset):
            job = Job(preset)
            closing.callback(job.close)
            return job

        yield make


def calls():
    made = []
    return made, lambda: made.append(None)


def goes_on(job, clients, sequence):
    job.pull("worker-0", "worker-1")
    job.push("worker-0", sequence, 7)
    job.push("worker-1", sequence, 8)
    return saved(clients)


def test_shards_are_started_again_from_a_snapshot(job_of):
    job = job_of("dc-asgd-a")
    clients = job.start(State(job.reference.weights, job.reference.state))
    job.pull("worker-0", "worker-1")
    for sequence in (1, 2, 3):
        job.push("worker-0", sequence, sequence, tasks=[sequence])
    job.push("worker-1", 1, 4, tasks=[4])
    part = gradients(1)[0][: job.running[0].store.size].copy()
    job.running[0].store.push("worker-1", Gradient(2, part, tasks=[7]))
    made, copied = calls()
    snapshot = snapshot_of(clients, copied)
    assert len(made) == 1
    assert [tasks.to_array().tolist() for tasks in snapshot.tasks] == [[[1, 5], [7, 8]], [[1, 5]]]
    assert snapshot.closed_rounds == (0, 0)
    wanted = goes_on(job, clients, 5)
    found = goes_on(job, job.start(snapshot.state, snapshot.records), 1)
    np.testing.assert_array_equal(found.weights, wanted.weights)
    assert sorted(found.optimizer) == sorted(wanted.optimizer)
    for index, value in wanted.optimizer.items():
        np.testing.assert_array_equal(found.optimizer[index], value)


def test_rounds_continue_after_the_newest_closed_one(job_of):
    job = job_of("bsp")
    clients = job.start(State(job.reference.weights, job.reference.state))
    job.pull("worker-0")
    job.push("worker-0", 1, 1, round=1)
    snapshot = snapshot_of(clients)
    assert snapshot.closed_rounds == (1, 1)
    assert [tasks.to_array().tolist() for tasks in snapshot.tasks] == [[], []]
    again = job.start(snapshot.state, snapshot.records)
    assert [shard.store.closed_round for shard in job.running] == [1, 1]
    assert snapshot_of(again).closed_rounds == (1, 1)


# -- artificial shards


class SlowShard(FakeShard):
    """Shard that sends its first chunk, and the rest of its state, when these events are set."""

    def __init__(self, index):
        self.first, self.rest, self.sent = threading.Event(), threading.Event(), threading.Event()
        self.first.set()
        self.requests, self.records, self.breaks = 0, True, False
        super().__init__(workers_pb2.ShardAssignment(index=index, shards=SHARDS, job_token="t"))

    def Read(self, request_iterator, context):
        self.requests += 1
        requests = request_iterator if self.records else iter([shards_pb2.ReadRequest()])
        chunks = super().Read(requests, context)
        assert self.first.wait(TIMEOUT_S)
        yield next(chunks)
        assert self.rest.wait(TIMEOUT_S)
        if self.breaks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut off")
        yield from chunks
        self.sent.set()


class Taking(threading.Thread):
    """Thread that takes a snapshot.

    Attributes:
        copied: Event of the call of ``copied``.
        calls: Result of ``check`` at each of these calls.
    """

    def __init__(self, clients, check=lambda: None):
        super().__init__()
        self.copied, self.calls = threading.Event(), []
        self._clients, self._check, self._outcome = clients, check, None
        self.start()

    def run(self):
        try:
            self._outcome = snapshot_of(self._clients, self._note)
        except NfdtError as error:
            self._outcome = error

    def _note(self):
        self.calls.append(self._check())
        self.copied.set()

    def outcome(self):
        self.join(TIMEOUT_S)
        assert not self.is_alive()
        assert len(self.calls) == 1
        return self._outcome


@pytest.fixture
def slow():
    shards = [SlowShard(index) for index in range(SHARDS)]
    entries = {"layout": LAYOUT, "optimizer_variables": [{"variable": i} for i in (-1, 0, 1)]}
    clients = connect_shards([shard.address for shard in shards], Manifest(entries), "t")
    yield clients, shards
    for shard in shards:
        shard.first.set(), shard.rest.set()
    clients.close()
    for shard in shards:
        shard.stop()


def finish(shards):
    for shard in shards:
        shard.rest.set()


def test_all_copies_are_taken_before_the_transfer_ends(slow):
    clients, shards = slow
    taking = Taking(clients)
    assert taking.copied.wait(TIMEOUT_S)
    clients.flush()  # other calls need not wait either
    assert [shard.flushes for shard in shards] == [1, 1]
    assert not any(shard.sent.is_set() for shard in shards)
    finish(shards)
    snapshot = taking.outcome()
    assert isinstance(snapshot, ShardSnapshot)
    np.testing.assert_array_equal(snapshot.state.weights, WEIGHTS)
    assert sorted(snapshot.records) == [
        f"{i}/{name}" for i in range(SHARDS) for name in ("mode/closed_round", "tasks", "version")
    ]


def test_the_copy_of_the_slowest_shard_counts(slow):
    clients, shards = slow
    shards[1].first.clear()
    finish(shards)
    taking = Taking(clients, shards[1].first.is_set)
    assert shards[0].sent.wait(TIMEOUT_S)
    shards[1].first.set()
    assert isinstance(taking.outcome(), ShardSnapshot)
    assert taking.calls == [True]


def test_the_wait_for_copies_ends_when_a_shard_is_gone(slow):
    clients, shards = slow
    shards[1].stop()
    taking = Taking(clients)
    assert taking.copied.wait(TIMEOUT_S)
    assert not shards[0].sent.is_set()
    finish(shards)
    error = taking.outcome()
    assert isinstance(error, ServerUnreachable)
    assert "shard 1" in str(error)


def test_a_shard_that_is_lost_during_its_transfer_is_not_read_again(slow):
    clients, shards = slow
    shards[1].breaks = True
    finish(shards)
    assert isinstance(Taking(clients).outcome(), ServerUnreachable)
    assert [shard.requests for shard in shards] == [1, 1]


def test_a_shard_without_records_has_no_snapshot(slow):
    clients, shards = slow
    shards[1].records = False
    finish(shards)
    error = Taking(clients).outcome()
    assert isinstance(error, ProtocolError)
    assert "Shard 1: expected its state with records" in str(error)
