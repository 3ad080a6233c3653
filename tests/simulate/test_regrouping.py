"""Groups that change while a job is simulated, and flat workers that become groups."""

from __future__ import annotations

import numpy as np
import pytest

from nfdt.coordinator.group_plan import SHRINK_S
from nfdt.coordinator.online_planner import WORLDS_S
from nfdt.core.errors import JobFailed
from tests.support.simulated_jobs import ROWS, as_text, build, cluster, simulate

SLOWER_AT_S, EPOCHS = 15.0, 24
CHANGING = cluster({"step_ms": 1000, "count": 3}, {"step_ms": 1000, "drift": [{"at_s": SLOWER_AT_S, "slowdown": 4}]})
BUSY = cluster({"step_ms": 1000, "count": 6}, shards={"apply_ms": 600})


def train(described, algorithm="group-sync", epochs=EPOCHS, **options):
    return simulate(described, algorithm, model=build(rate=0.002, momentum=0.0), epochs=epochs, **options)[0]


@pytest.fixture(scope="module")
def changing():
    return train(CHANGING)


def groups_of(job):
    return [[tuple(group["members"]) for group in data["groups"]] for _, data in job.record.groups]


def ends_of(job):
    return [point.at_s for point in job.record.points if point.ends_epoch]


def test_a_machine_that_becomes_slower_gets_a_group_of_its_own(changing):
    assert groups_of(changing) == [[(0, 1, 2, 3)], [(0, 1, 2), (3,)]]
    (began, first), (at_s, then) = changing.record.groups
    assert (began, first["reason"], then["reason"]) == (0.0, "as described", "speeds have changed")
    assert at_s > SLOWER_AT_S + WORLDS_S
    before = max(end for end in ends_of(changing) if end < at_s)
    assert at_s == pytest.approx(before + WORLDS_S, abs=0.01)
    assert changing.record.samples == EPOCHS * ROWS
    assert {worker for worker, _ in changing.record.answered} == {"worker-0", "worker-1", "worker-2"}
    assert np.isfinite(changing.snapshot().weights).all()


def test_the_same_seed_gives_the_same_groups_and_weights(changing):
    again = train(CHANGING)
    assert again.record.groups == changing.record.groups
    assert as_text(again) == as_text(changing)


@pytest.mark.parametrize(("epochs", "options"), [(EPOCHS, {"groups": "1"}), (9, {})])
def test_groups_stay_where_they_are_named_or_a_change_would_not_pay(epochs, options):
    job = train(CHANGING, epochs=epochs, **options)
    assert ends_of(job)[-1] > SLOWER_AT_S
    assert groups_of(job) == [[(0, 1, 2, 3)]]


def test_a_machine_that_fails_while_worlds_come_up_takes_its_new_group_with_it(changing):
    fails_at_s = changing.record.groups[1][0] - WORLDS_S / 2
    drift = [{"at_s": SLOWER_AT_S, "slowdown": 4}]
    described = cluster({"step_ms": 1000, "count": 3}, {"step_ms": 1000, "drift": drift, "fails_at_s": fails_at_s})
    job = train(described)
    assert groups_of(job) == groups_of(changing)
    assert {worker for worker, _ in job.record.answered} == {"worker-0", "worker-1"}
    assert job.record.samples == EPOCHS * ROWS


@pytest.mark.parametrize("options", [{}, {"groups": "1"}], ids=["by_speed", "named"])
def test_a_group_goes_on_without_a_lost_machine_and_takes_it_back_between_two_epochs(options):
    lost = {"step_ms": 1000, "fails_at_s": 4.5, "returns_after_s": SHRINK_S + WORLDS_S + 1}
    job = train(cluster({"step_ms": 1000, "count": 2}, lost), **options)
    assert groups_of(job) == [[(0, 1, 2)], [(0, 1)], [(0, 1, 2)]]
    times = [at_s for at_s, _ in job.record.groups]
    assert times[:2] == [0.0, 4.5 + SHRINK_S + WORLDS_S]
    assert times[2] - WORLDS_S in [pytest.approx(end, abs=0.01) for end in ends_of(job)]
    assert {data["reason"] for _, data in job.record.groups[1:]} == {"a group was formed again"}
    assert job.record.samples == EPOCHS * ROWS


def test_a_group_whose_machines_are_all_away_waits_for_one():
    lost = {"step_ms": 1000, "count": 2, "fails_at_s": 4.5, "returns_after_s": 100}
    job = train(cluster(lost))
    assert groups_of(job) == [[(0, 1)], [(0, 1)]]
    assert job.record.groups[1][0] > 104.5
    with pytest.raises(JobFailed, match="All workers have failed"):
        train(cluster({"step_ms": 1000, "count": 2, "fails_at_s": 4.5}))


def test_a_machine_may_return_while_the_worlds_of_all_groups_come_up():
    described = {"step_ms": 1000, "fails_at_s": 1.0}
    drift = [{"at_s": 25.0, "slowdown": 4}]

    def trained(**returns):
        return train(
            cluster({"step_ms": 1000, "count": 3}, {"step_ms": 1000, "drift": drift}, described | returns), epochs=40
        )

    at_s = next(at_s for at_s, data in trained().record.groups if data["reason"] == "speeds have changed")
    job = trained(returns_after_s=at_s - WORLDS_S / 2 - 1.0)
    assert job.record.samples == 40 * ROWS


def test_auto_turns_to_groups_where_pushes_are_dear():
    job = train(BUSY, "auto")
    (at_s, data), *_ = job.record.groups
    assert data["reason"] == "planned"
    assert sorted(n for members in groups_of(job)[0] for n in members) == list(range(6))
    assert len(data["groups"]) < 6
    assert job.spec.algorithm.topology == "groups"
    assert job.record.samples == EPOCHS * ROWS
    ends = ends_of(job)
    epochs = list(zip(ends, ends[1:], strict=False))
    flat = [end - began for began, end in epochs if end < at_s]
    grouped = [end - began for began, end in epochs if began > at_s]
    assert max(grouped) < min(flat)


@pytest.mark.parametrize("options", [{"plan": "overlap"}, {"steps_per_epoch": 6}])
def test_auto_stays_flat_where_it_may_not_turn(options):
    job = train(BUSY, "auto", **options)
    assert job.record.groups == []
    assert job.spec.algorithm.topology == "flat"
