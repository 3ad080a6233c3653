"""Promises of every batch policy."""

from __future__ import annotations

import pytest

from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import AXES, BATCH_FACTS
from nfdt.schedulers.batch_policies import BATCH_POLICIES, find_batch_policy
from nfdt.schedulers.throughput import Speeds, StepTime
from tests.support.simulated_cluster import job, started

REFERENCE = 16
NAMES = ("worker-0", "worker-1", "worker-2")
TIMES = [StepTime(0.0, 0.01), StepTime(0.0, 0.02), StepTime(0.1, 0.01)]


def sizes_of(name):
    return find_batch_policy(name).sizes(REFERENCE, resolve_algorithm("asgd", batch=name))


def test_every_policy_of_the_preset_axis_exists():
    assert set(BATCH_POLICIES) == set(AXES["batch"])


@pytest.mark.parametrize("name", BATCH_POLICIES)
def test_the_name_is_the_one_it_is_asked_for_by(name):
    policy = find_batch_policy(name)
    assert policy.name == name
    assert policy.facts is BATCH_FACTS[name]


@pytest.mark.parametrize("name", BATCH_POLICIES)
def test_a_full_batch_has_the_full_rate(name):
    assert find_batch_policy(name).facts.rate_of(1.0) == 1.0


@pytest.mark.parametrize("name", BATCH_POLICIES)
def test_sizes_differ_only_for_a_policy_that_declares_it(name):
    assert (sizes_of(name) is not None) == find_batch_policy(name).facts.follows_speed


@pytest.mark.parametrize("name", BATCH_POLICIES)
def test_predicted_sizes_sum_up_to_the_reference_batches(name):
    predicted = find_batch_policy(name).predicted(REFERENCE, TIMES)
    assert len(predicted) == len(TIMES)
    assert sum(predicted) == pytest.approx(REFERENCE * len(TIMES))


@pytest.mark.parametrize("name", [name for name in BATCH_POLICIES if sizes_of(name)])
@pytest.mark.parametrize("total", [1, 7, 3 * REFERENCE])
def test_sizes_are_positive_and_keep_their_sum_and_a_round_is_split_without_rest(name, total):
    sizes, speeds = sizes_of(name), Speeds()
    for worker in NAMES:
        sizes.joined(worker)
    for _ in range(40):
        for worker, time in zip(NAMES, TIMES, strict=True):
            speeds.measured(worker, sizes.of(worker), time.seconds(sizes.of(worker)))
            sizes.stepped(worker, speeds)
            assert sum(map(sizes.of, NAMES)) == REFERENCE * len(NAMES)
            assert all(sizes.of(each) > 0 for each in NAMES)
    assert sum(count for _, count in sizes.split(total)) == total
    sizes.left(NAMES[0])
    sizes.left("unknown")


@pytest.mark.parametrize("name", BATCH_POLICIES)
@pytest.mark.parametrize("consistency", AXES["consistency"])
def test_every_sample_is_trained_once_per_epoch(name, consistency):
    cluster = started(job(workers=3, samples=50, epochs=2, overrides={"batch": name, "consistency": consistency}))
    cluster.run()
    assert [sorted(cluster.trained[epoch].values()) for epoch in (0, 1)] == [[1] * 50] * 2
