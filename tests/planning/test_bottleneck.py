"""Bottlenecks of clusters that were made to have one each."""

from __future__ import annotations

import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.planning.comparison import compare, find_bottleneck, one_machine
from nfdt.planning.cost_model import Cluster, SharedLink, WorkerCost
from nfdt.schedulers.throughput import StepTime

SAMPLES = 100_000
STEP = StepTime(0.0, 0.001)  # 10 ms for a batch of 10


def cluster(*workers: WorkerCost, **costs) -> Cluster:
    return Cluster(workers, 10, **costs)


def alike(count: int = 4, step: StepTime = STEP, **costs) -> tuple[WorkerCost, ...]:
    return tuple(WorkerCost(f"w{number}", step, **costs) for number in range(count))


CASES = {
    "compute": ("asgd", cluster(*alike())),
    "links": ("asgd", cluster(*alike(exchange_s=0.03, travel_s=0.03))),
    "shared links": ("asgd", cluster(*alike(), links=(SharedLink(0.02, frozenset(range(4))),))),
    "latency": ("asgd", cluster(*alike(exchange_s=0.03))),
    "shard": ("asgd", cluster(*alike(exchange_s=0.02), shard_step_s=0.02)),
    "allreduce": ("allreduce", cluster(*alike(), allreduce_s=0.05)),
    "slowest worker": ("bsp", cluster(*alike(3), *alike(1, StepTime(0.0, 0.004)))),
}


@pytest.mark.parametrize("case", CASES)
def test_the_part_that_was_made_slow_is_named(case):
    name, slow = CASES[case]
    found = find_bottleneck(resolve_algorithm(name), slow, SAMPLES)
    assert found.part == case.removeprefix("shared ")
    assert 0.1 < found.share <= 1
    assert found.remedy


def test_the_share_is_what_would_be_saved():
    found = find_bottleneck(resolve_algorithm("allreduce"), cluster(*alike(), allreduce_s=0.03), SAMPLES)
    assert found.share == pytest.approx(0.75)  # 30 of 40 ms


def test_a_preset_is_compared_with_one_machine():
    four = cluster(*alike())
    alone = one_machine(four, SAMPLES)
    assert (alone.name, alone.samples_per_s, alone.epoch_s) == ("the fastest worker alone", 1000, 100)
    plain = one_machine(four, SAMPLES, plain_s=0.02)
    assert (plain.name, plain.samples_per_s, plain.epoch_s) == ("plain Keras", 500, 200)
    (run,) = compare([resolve_algorithm("asgd")], four, SAMPLES, plain)
    assert run.speed_up == 4  # four workers that compute in half the time of plain Keras are no more than four
