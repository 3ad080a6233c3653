"""Consistency, task and batch policies added by a class, a line of facts and a registry line: they train a job."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.consistency import POLICIES, Free
from nfdt.core.specs import presets
from nfdt.core.specs.presets import AXES, BatchFacts, ConsistencyFacts
from nfdt.schedulers.batch_policies import BATCH_POLICIES, FixedBatch
from nfdt.schedulers.group_shares import FixedSizes
from nfdt.schedulers.task_policies import TASK_POLICIES, DynamicTasks
from tests.support.simulated_jobs import BATCH, ROWS, X, Y, build, cluster, simulate

MACHINES = ({}, {"step_ms": 200}, {"step_ms": 400})


class InTurn(Free):
    """Policy of one task at a time in the whole job: the weights of a gradient are always the newest ones."""

    name = "in-turn"
    facts = ConsistencyFacts(bounded=True)
    lease_limit = 1

    def __init__(self):
        self.holder = None

    def left(self, worker):
        self.finished(worker)

    def started(self, worker, tasks=1):
        self.holder = worker

    def finished(self, worker, tasks=1):
        self.holder = None if self.holder == worker else self.holder

    def may_start(self, worker, in_flight=0):
        return self.holder is None

    def waiting_for(self, worker, in_flight=0):
        return () if self.holder is None else (self.holder,)

    def must_pull(self, worker, in_flight=0):
        return True


class Descending(DynamicTasks):
    """Policy in which each worker gets half the share of the worker before it."""

    name = "descending"
    divides = True

    def shares(self, workers, speeds, size_of):
        return {worker: 0.5**place for place, worker in enumerate(workers)}


class Halves(FixedBatch):
    """Policy in which every batch has half the reference size, at the full learning rate."""

    name = "halves"
    facts = BatchFacts()

    def sizes(self, reference, algorithm):
        return FixedSizes(reference // 2)


@pytest.fixture(autouse=True)
def added(monkeypatch):
    """Add members as their author does: a line in the table of facts, a line in the registry."""
    for axis, name, facts in (
        ("consistency", InTurn.name, presets.CONSISTENCY_FACTS),
        ("batch", Halves.name, presets.BATCH_FACTS),
    ):
        monkeypatch.setitem(facts, name, (InTurn if axis == "consistency" else Halves).facts)
        monkeypatch.setitem(AXES, axis, tuple(facts))
    monkeypatch.setitem(AXES, "tasks", (*AXES["tasks"], Descending.name))
    monkeypatch.setitem(POLICIES, InTurn.name, lambda spec: InTurn())
    monkeypatch.setitem(TASK_POLICIES, Descending.name, Descending)
    monkeypatch.setitem(BATCH_POLICIES, Halves.name, Halves())


def trained(**choice):
    """Train a job of two epochs with a choice on an axis; the loss must decrease."""
    model = build(rate=0.005, momentum=0.0)
    before = model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
    job, _, history = simulate(cluster(*MACHINES), "asgd", model=model, epochs=2, **choice)
    assert history.history["loss"][-1] < before
    return job


def test_a_consistency_policy_is_added_in_one_file():
    job = trained(consistency=InTurn.name)
    assert set(job.record.staleness) == {0}
    assert len(job.record.answered) == 2 * ROWS // BATCH


def test_a_task_policy_is_added_in_one_file():
    job = trained(tasks=Descending.name)
    workers = [worker for worker, task in job.record.answered if task < ROWS // BATCH]
    counts = [workers.count(f"worker-{index}") for index in range(3)]
    assert sum(counts) == ROWS // BATCH
    assert counts[0] > counts[1] > counts[2]


def test_a_batch_policy_is_added_in_one_file():
    job = trained(batch=Halves.name)
    assert len(job.record.answered) == 4 * ROWS // BATCH
    assert np.isfinite(job.snapshot().weights).all()
