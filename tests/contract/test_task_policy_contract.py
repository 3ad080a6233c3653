"""Promises of every task policy."""

from __future__ import annotations

import pytest

from nfdt.coordinator.membership import Member
from nfdt.core.specs.presets import AXES
from nfdt.schedulers.leases import LeaseBook
from nfdt.schedulers.sources import PlannedTasks
from nfdt.schedulers.task_policies import TASK_POLICIES, EpochView, make_task_policy
from nfdt.schedulers.tasks import TaskPlan
from nfdt.schedulers.throughput import Speeds
from tests.support.simulated_cluster import job, started

BATCH = 4
NAMES = ("worker-0", "worker-1", "worker-2")


def speeds_of(*step_s: float, steps: int = 20) -> Speeds:
    speeds = Speeds()
    for name, seconds in zip(NAMES, step_s, strict=False):
        for _ in range(steps):
            speeds.measured(name, BATCH, seconds)
    return speeds


def view_of(speeds: Speeds, steps: int) -> EpochView:
    members = [Member(name, index, seen_at=0.0, ready=True) for index, name in enumerate(NAMES)]
    book = LeaseBook(PlannedTasks(TaskPlan(steps * BATCH, BATCH)))
    return EpochView(members, book, speeds, lambda name: BATCH, BATCH, 0.0)


def test_every_policy_of_the_preset_axis_exists():
    assert set(TASK_POLICIES) == set(AXES["tasks"])


@pytest.mark.parametrize("name", TASK_POLICIES)
def test_the_name_is_the_one_it_is_asked_for_by(name):
    assert make_task_policy(name).name == name


@pytest.mark.parametrize("name", TASK_POLICIES)
def test_every_job_has_a_policy_of_its_own(name):
    assert make_task_policy(name) is not make_task_policy(name)


@pytest.mark.parametrize("name", TASK_POLICIES)
@pytest.mark.parametrize("step_s", [(), (0.1, 0.1, 0.1), (0.1, 0.2, 0.8)])
def test_shares_are_those_of_a_policy_that_divides_and_positive(name, step_s):
    policy = make_task_policy(name)
    shares = policy.shares(NAMES, speeds_of(*step_s), lambda name: BATCH)
    if not policy.divides:
        assert shares is None
    elif step_s:
        assert shares is not None
        assert set(shares) == set(NAMES)
        assert all(share > 0 for share in shares.values())


@pytest.mark.parametrize("name", TASK_POLICIES)
@pytest.mark.parametrize("step_s", [(), (0.1, 0.1, 0.1), (0.1, 0.2, 0.8)])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_a_limit_is_at_most_the_lease_and_some_worker_gets_a_task(name, step_s, steps):
    policy, view = make_task_policy(name), view_of(speeds_of(*step_s), steps)
    limits = [policy.limit(8, worker, view) for worker in view.workers]
    assert all(0 <= limit <= 8 for limit in limits)
    assert any(limits)


@pytest.mark.parametrize("name", TASK_POLICIES)
def test_a_lease_of_one_task_stays_one_where_much_is_left(name):
    policy, view = make_task_policy(name), view_of(speeds_of(0.1, 0.2, 0.8), 1000)
    assert [policy.limit(1, worker, view) for worker in view.workers] == [1, 1, 1]


@pytest.mark.parametrize("name", TASK_POLICIES)
@pytest.mark.parametrize("consistency", AXES["consistency"])
def test_every_sample_is_trained_once_per_epoch(name, consistency):
    cluster = started(job(workers=3, samples=50, epochs=2, overrides={"tasks": name, "consistency": consistency}))
    cluster.run()
    assert [sorted(cluster.trained[epoch].values()) for epoch in (0, 1)] == [[1] * 50] * 2
