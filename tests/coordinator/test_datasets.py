"""Epochs over a dataset that workers run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nfdt.consistency import make_policy
from nfdt.coordinator.coordinator import Coordinator
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.core.work.instructions import (
    BeginEpoch,
    CollectState,
    Emit,
    EpochState,
    FlushShards,
    ForgetWorker,
    Leave,
    Report,
    Summarise,
    Summary,
    Supply,
    TrainingDone,
    Wait,
    Work,
)
from nfdt.worker.driver import Step
from tests.support.clocks import ManualClock
from tests.support.simulated_cluster import SimulatedWorker

SHA = "a" * 64


def job(*, epochs=2, steps=None, batches=None, rows=100, split=10, workers=2):
    algorithm = resolve_algorithm("asgd")
    return JobSpec(
        program=SHA,
        code=True,
        algorithm=algorithm,
        cluster=ClusterSpec(workers=workers),
        fit=FitSpec(epochs=epochs, steps_per_epoch=steps),
        train=DataSpec(kind="dataset", code=SHA, rows=rows, split=split, batches=batches),
    )


class DatasetWorker(SimulatedWorker):
    """Worker of batches of one split each, which has at most two batches ahead."""

    def __init__(self, cluster, name, index):
        super().__init__(cluster, name, index)
        self.iteration, self.requests, self.over = None, 0, False
        self.waiting, self.trained, self.iterations = [], [], []
        cluster.coordinator.joined(name, index)

    def read(self):
        while self.iteration is not None and len(self.waiting) < 2 and not self.over:
            split = self.cluster.coordinator.take_rows(self.name, self.iteration, 0, self.requests)
            self.requests += 1
            self.over = split is None
            self.waiting += [] if split is None else [split]

    def turn(self):
        """Make one call; return the instruction."""
        self.read()
        supply = None if self.iteration is None else Supply(self.iteration, len(self.waiting), self.over)
        self.report = replace(self.report, supply=supply)
        instruction = self.ask()
        self.do()
        return instruction

    def compute(self, task, held):
        split = self.waiting.pop(0)
        self.trained.append((self.iteration, split))
        return Step(np.zeros(1, np.float32), len(split), {}, 0.0)

    def execute(self, instruction):
        match instruction:
            case BeginEpoch(epoch, iteration=iteration):
                self.epoch = epoch
                self.iterations.append(iteration)
                if iteration != self.iteration:
                    self.iteration, self.requests, self.over, self.waiting = iteration, 0, False, []
            case CollectState(epoch):
                return Report(epoch_state=EpochState(epoch, b"", b"", len(self.trained)))
            case Summarise():
                return Report(summary=Summary({}))
        return Report()


class Run:
    def __init__(self, spec):
        self.spec = spec
        self.coordinator = Coordinator(spec, make_policy(spec.algorithm), ManualClock())
        self.coordinator.proceed(spec.fit.epochs)
        self.workers = [DatasetWorker(self, f"w{n}", n) for n in range(spec.cluster.workers)]
        self.events, self.done = [], False

    def effects(self):
        for effect in self.coordinator.drain():
            if isinstance(effect, Emit):
                self.events.append((effect.kind, effect.data))
            elif isinstance(effect, FlushShards):
                self.coordinator.flushed(effect.epoch)
            elif isinstance(effect, ForgetWorker):
                self.coordinator.forgotten(effect.worker, [frozenset()])
            elif isinstance(effect, TrainingDone):
                self.done = True

    def to_the_end(self, turns=1000):
        for _ in range(turns):
            for worker in list(self.workers):
                if isinstance(worker.turn(), Leave):
                    self.workers.remove(worker)
                self.effects()
            if self.done:
                return self
        raise AssertionError(f"not over: {self.coordinator.phase}, waits for {self.coordinator.waiting_for()}")

    def of(self, kind):
        return [data for name, data in self.events if name == kind]


def rows_of(workers, iteration):
    splits = [split for worker in workers for number, split in worker.trained if number == iteration]
    return sorted(row for split in splits for row in split)


def test_every_row_is_trained_once_in_every_epoch():
    run = Run(job())
    workers = list(run.workers)
    run.to_the_end()
    assert rows_of(workers, 0) == rows_of(workers, 1) == list(range(100))
    assert [end["samples"] for end in run.of("epoch_end")] == [100, 100]
    assert [end["steps"] for end in run.of("epoch_end")] == [10, 10]
    assert [begin["steps"] for begin in run.of("epoch_begin")] == [None, None]


@pytest.mark.parametrize("batches", [10, None])
def test_an_iteration_goes_on_until_it_is_over(batches):
    run = Run(job(epochs=4, steps=5, batches=batches))
    workers = list(run.workers)
    run.to_the_end()
    assert [end["steps"] for end in run.of("epoch_end")][:2] == [5, 5]
    assert rows_of(workers, 0) == list(range(100))
    assert all(set(worker.iterations) >= {0, 1} for worker in workers)
    if batches:
        assert rows_of(workers, 1) == list(range(100))
        assert not run.of("log")


def test_an_epoch_without_enough_data_ends_early_and_says_so():
    run = Run(job(epochs=1, steps=30)).to_the_end()
    assert run.of("epoch_end")[0]["steps"] == 10
    assert "ended before steps_per_epoch=30" in run.of("log")[0]["text"]


def test_the_rows_of_a_lost_worker_are_lost_and_the_epoch_ends():
    run = Run(job(epochs=1))
    lost, other = run.workers
    while not isinstance(lost.turn(), Work):
        other.turn()
    run.workers.remove(lost)
    run.coordinator.left("w0", "killed")
    run.to_the_end()
    assert len(rows_of([other], 0)) < 100
    assert len(run.of("epoch_end")) == 1


def test_a_worker_without_batches_waits_for_the_others():
    run = Run(job(epochs=1, rows=10, split=10))
    one, two = run.workers
    for worker in (one, two):
        assert isinstance(worker.turn(), BeginEpoch | Wait)
    assert isinstance(one.turn(), BeginEpoch | Work)
    while not two.over:
        two.turn()
    assert isinstance(two.turn(), Wait)
    run.to_the_end()


def test_other_jobs_and_workers_get_no_rows():
    run = Run(job())
    assert run.coordinator.take_rows("unknown", 0, 0, 0) is None
