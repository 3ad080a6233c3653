"""The work of a simulation grows in proportion to its workers: thousands of them are simulated in minutes."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np
import pytest

from nfdt.core.work import instructions as ins
from nfdt.simulate.events import Agenda
from nfdt.simulate.roster import WaitingWorkers
from tests.support.simulated_jobs import BATCH, build, cluster, simulate

WORKERS = (8, 16, 64)
STEPS = 2  # of each worker
WAITING = 1000
POINTER = 8  # bytes


class OneTask:
    """Coordinator with one task for all who wait."""

    def __init__(self, *, wait_alike):
        self.wait_alike, self.asked, self._tasks = wait_alike, [], 1

    def next(self, worker):
        self.asked.append(worker)
        self._tasks -= 1
        return ins.Work(0, ()) if self._tasks >= 0 else ins.Wait()


@pytest.mark.parametrize(("alike", "asked"), [(True, 2), (False, WAITING)])
def test_a_report_asks_no_more_of_those_who_wait_than_may_go_on_and_one_besides(alike, asked):
    coordinator = OneTask(wait_alike=alike)
    waiting = WaitingWorkers(Agenda(), coordinator)
    for number in range(WAITING):
        waiting.add(f"worker-{number}")
    assert waiting.wake()
    assert len(coordinator.asked) == asked
    assert not waiting.wake()
    assert coordinator.asked[asked] == "worker-1"


def test_a_report_copies_nothing_of_those_who_wait():
    waiting = WaitingWorkers(Agenda(), OneTask(wait_alike=True))
    for number in range(WAITING):
        waiting.add(f"worker-{number}")
    tracemalloc.start()
    try:
        waiting.wake()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < WAITING * POINTER


def calls_of(workers):
    """Count the calls of functions in a job in which each worker makes so many steps, half of them more slowly."""
    x = np.random.default_rng(0).normal(size=(workers * STEPS * BATCH, 5)).astype("float32")
    half = {"count": workers // 2, "jitter": 0.1}
    described, model, calls = cluster(half, {**half, "step_ms": 200}), build(rate=1e-6), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        job, _, _ = simulate(described, model=model, x=x, y=x[:, :1])
    finally:
        sys.setprofile(before)
    assert len(job.record.answered) == workers * STEPS
    return calls


def test_the_calls_of_a_job_grow_in_proportion_to_its_workers():
    calls_of(2)  # what only the first job of a process does
    few, more, many = map(calls_of, WORKERS)
    assert many - more < 1.05 * (WORKERS[2] - WORKERS[1]) / (WORKERS[1] - WORKERS[0]) * (more - few)
