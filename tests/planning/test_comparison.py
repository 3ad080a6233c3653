"""Presets beside one machine: at most the sum of the workers' speeds, a range around the forecast, and one worker."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import PRESETS
from nfdt.planning.comparison import compare, one_machine, suits
from nfdt.planning.cost_model import Cluster, WorkerCost
from nfdt.schedulers.throughput import StepTime

BATCH = 32
lines = st.builds(StepTime, st.floats(0.0, 0.05), st.floats(1e-5, 1e-2))
workers = st.lists(
    st.builds(WorkerCost, st.just("w"), lines, st.floats(0.0, 0.1), st.floats(0.0, 0.3)), min_size=1, max_size=8
).map(tuple)
clusters = st.builds(
    Cluster,
    workers,
    st.just(BATCH),
    shard_step_s=st.floats(0.0, 0.01),
    allreduce_s=st.floats(0.0, 0.1),
    epoch_end_s=st.floats(0.0, 2.0),
)
spreads = st.tuples(st.floats(0.1, 1.0), st.floats(1.0, 10.0))
presets = st.sampled_from(sorted(PRESETS))


@given(presets, clusters, st.integers(1, 100_000), st.one_of(st.none(), st.floats(1e-4, 1.0)), spreads)
def test_no_preset_is_planned_above_the_sum_of_speeds_and_the_range_contains_the_forecast(
    name, cluster, samples, plain_s, spread
):
    alone = one_machine(cluster, samples, plain_s)
    (run,) = compare([resolve_algorithm(name)], cluster, samples, alone, spread)
    fastest_s = min(worker.step.seconds(BATCH) for worker in cluster.workers)
    limit = sum(fastest_s / worker.step.seconds(BATCH) for worker in cluster.workers)
    assert 0 < run.low <= run.speed_up <= run.high <= limit * (1 + 1e-9)
    assert limit <= len(cluster.workers) * (1 + 1e-9)
    assert run.forecast.samples_per_s <= alone.sum_of_speeds * (1 + 1e-9)
    assert run.speed_up == pytest.approx(run.forecast.samples_per_s / alone.samples_per_s)


def test_a_measured_machine_of_half_the_speed_adds_half():
    cluster = Cluster((WorkerCost("a", StepTime(0.0, 1e-3)), WorkerCost("b", StepTime(0.0, 2e-3))), BATCH)
    assert one_machine(cluster, 1000, plain_s=0.05).limit == pytest.approx(1.5)
    halves = Cluster(cluster.workers[1:], BATCH)
    assert one_machine(halves, 1000, plain_s=0.05, step_s=0.032).limit == pytest.approx(0.5)


def test_waiting_for_each_other_widens_the_range_more():
    cluster = Cluster(tuple(WorkerCost("w", StepTime(0.0, 1e-3), exchange_s=0.01) for _ in range(4)), BATCH)
    alone = one_machine(cluster, 100_000)
    free, barrier, rings = compare(
        [resolve_algorithm(name) for name in ("asgd", "bsp", "group-sync")], cluster, 100_000, alone
    )
    assert free.low == pytest.approx(free.speed_up / 1.1)
    assert barrier.low == pytest.approx(barrier.speed_up / 1.26)
    assert rings.low == pytest.approx(rings.speed_up / 1.26)


def test_the_forecast_of_one_worker_has_no_error_besides_the_spread():
    cluster = Cluster((WorkerCost("w", StepTime(0.0, 1e-3), exchange_s=0.01),), BATCH)
    (run,) = compare([resolve_algorithm("asgd")], cluster, 100_000, one_machine(cluster, 100_000))
    assert (run.low, run.high) == (run.speed_up, run.speed_up)
    assert not run.is_faster


@pytest.mark.parametrize("name", PRESETS)
def test_one_worker_can_use_what_neither_waits_nor_shares(name):
    expected = name in ("asgd", "dc-asgd", "dc-asgd-a", "dc-asgd-k", "ddc-asgd", "local-ddc")
    assert suits(resolve_algorithm(name), 1) == expected
    assert suits(resolve_algorithm(name), 2)


def test_the_ends_of_epochs_can_be_the_bottleneck():
    cluster = Cluster((WorkerCost("w", StepTime(0.0, 1e-3)),), BATCH, epoch_end_s=1.0)
    (run,) = compare([resolve_algorithm("asgd")], cluster, 1000, one_machine(cluster, 1000))
    assert run.bottleneck.part == "ends of epochs"
    assert run.bottleneck.share == pytest.approx(0.5, abs=0.01)
    assert "longer epochs" in run.bottleneck.remedy
