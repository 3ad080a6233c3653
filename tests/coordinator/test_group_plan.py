"""Groups that a job forms, and their shares, from measured steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.coordinator.group_plan import GroupPlan, groups_event, name_of
from nfdt.core.specs.job import ClusterSpec, DataSpec, FitSpec, JobSpec, resolve_algorithm
from nfdt.schedulers.ring_network import RingLink, RingNetwork

ROWS = 32
FAST_AND_SLOW = ((0, 1), (2, 3))
ALL = ((0, 1, 2, 3),)


def plan_of(workers: int = 4, network: RingNetwork | None = None, **options) -> GroupPlan:
    return GroupPlan(
        JobSpec(
            program="0" * 64,
            algorithm=resolve_algorithm("group-sync", **options),
            cluster=ClusterSpec(workers=workers),
            fit=FitSpec(epochs=10, batch_size=ROWS),
            train=DataSpec(kind="arrays", samples=1000),
        ),
        network,
    )


def measure(plan: GroupPlan, *seconds: float | None, alpha_s: float = 0.0) -> GroupPlan:
    """Measure enough steps of each member for its step-time line; none of a member with None."""
    for member, step_s in enumerate(seconds):
        for _ in range(10 if step_s else 0):
            for rows in (ROWS // 2, 2 * ROWS):
                plan.measured(str(member), rows, alpha_s + step_s * rows / ROWS)
    return plan


def test_groups_stand_once_they_are_settled():
    plan = measure(plan_of(), 1, 1, 4, 4)
    assert not plan.settled
    assert plan.review(ALL, 1e9, 0.0) is None  # no plan is settled that could change
    plan.settle(FAST_AND_SLOW)
    assert plan.settled


def test_groups_that_are_asked_for_are_those_whose_members_live():
    plan = measure(plan_of(groups="0,2;1,3"), 1, 1, 4, 4)
    assert plan.explicit == ((0, 2), (1, 3))
    assert plan.choose(((0,), (1, 3))) == ((0,), (1, 3))
    plan.settle(plan.explicit)
    measure(plan, 9, 1, 4, 4)
    assert [plan.review(plan.explicit, 1e9, 0.0) for _ in range(4)] == [None] * 4


@pytest.mark.parametrize("groups", ["auto", "2"])
@pytest.mark.parametrize("seconds", [(1, 1, 1, 1), (1, 1.1, 1.05, 1.15), (1, 1.15, 1.1, 1.05)])
def test_groups_that_may_not_span_machines_are_divided_by_machine_alone(groups, seconds):
    plan = measure(plan_of(groups=groups, network=RingNetwork(("a", "b", "a", "b"), size=1000)), *seconds)
    plan.spans_machines = False
    assert sorted(plan.choose(ALL)) == [(0, 2), (1, 3)]


def test_too_few_groups_that_may_not_span_machines_become_one_per_machine():
    plan = measure(plan_of(groups="2", network=RingNetwork(("a", "b", "c", "a"))), 1, 1, 4, 4)
    plan.spans_machines = False
    assert sorted(plan.choose(ALL)) == [(0, 3), (1,), (2,)]


def test_groups_follow_speed():
    assert measure(plan_of(), 1, 4, 1, 4).choose(ALL) == ((0, 2), (1, 3))
    assert measure(plan_of(groups="3"), 1, 1, 4, 9).choose(ALL) == ((0, 1), (2,), (3,))


def test_no_more_groups_than_members_that_live():
    assert measure(plan_of(groups="3"), 1, 1, 4, 9).choose(((0,), (3,))) == ((0,), (3,))


def test_the_longer_the_exchange_the_less_the_groups_differ():
    plan = measure(plan_of(), 1, 1, 1.5, 1.5)
    assert plan.choose(ALL) == FAST_AND_SLOW
    plan.exchange_s = 10.0
    assert plan.choose(ALL) == ALL


def test_other_speeds_make_other_groups_if_that_pays():
    plan = measure(plan_of(), 1, 1, 4, 4)
    plan.settle(FAST_AND_SLOW)
    assert [plan.review(FAST_AND_SLOW, 1e9, 0.0) for _ in range(3)] == [None] * 3
    measure(plan, 4, 1, 4, 1)
    assert plan.review(FAST_AND_SLOW, 1e9, 1.0) is None  # a single review may be an outlier
    assert plan.review(FAST_AND_SLOW, 1e9, 1.0) == ((1, 3), (0, 2))
    assert plan.review(FAST_AND_SLOW, 1.0, 1e9) is None


@pytest.mark.parametrize(("exchange_s", "pays"), [(0.0, True), (10.0, False)])
def test_a_change_saves_less_of_longer_steps(exchange_s, pays):
    """Case: the change saves three fifths of a step without an exchange, an eighth of one with it."""
    plan = measure(plan_of(groups="2"), 1, 1, 4, 4)
    plan.exchange_s = exchange_s
    plan.settle(FAST_AND_SLOW)
    measure(plan, 4, 1, 4, 1)
    plan.review(FAST_AND_SLOW, 100.0, 30.0)
    assert plan.review(FAST_AND_SLOW, 100.0, 30.0) == (((1, 3), (0, 2)) if pays else None)


def test_an_exchange_of_all_is_no_change_of_one():
    """Compare members without the exchange time that all of them share."""
    plan = measure(plan_of(), 1, 1, 4, 4)
    plan.settle(FAST_AND_SLOW)
    plan.exchange_s = 5.0
    assert [plan.review(FAST_AND_SLOW, 1e9, 0.0) for _ in range(3)] == [None] * 3


def test_an_unmeasured_member_gets_the_mean_of_the_others():
    fast, slow = measure(plan_of(), 1, None, 3, None).shares(((0, 1), (2, 3)))
    assert fast.rows[1] > fast.rows[0] / 3
    assert [share.step_s for share in measure(plan_of(batch="fixed"), 1, None, 3, None).shares(((0, 2), (1, 3)))] == [
        pytest.approx(3.0),
        pytest.approx(2.0),
    ]
    (share,) = plan_of().shares(ALL)
    assert share.rows == (ROWS,) * 4
    assert (fast.members, slow.members) == FAST_AND_SLOW


def test_rows_stay_within_the_bounds_of_the_job():
    shares = measure(plan_of(batch_min=20, batch_max=40), 1, 1, 4, 4).shares(FAST_AND_SLOW)
    assert [share.rows for share in shares] == [(40, 40), (24, 24)]
    shares = measure(plan_of(batch_min=28, batch_max=99), 1, 1, 4, 4).shares(FAST_AND_SLOW)
    assert [share.rows for share in shares] == [(36, 36), (28, 28)]


def test_an_exchange_takes_its_time_of_every_step():
    plan = measure(plan_of(batch="fixed"), 1, 1, 4, 4)
    plan.exchange_s = 2.0
    assert [share.step_s for share in plan.shares(FAST_AND_SLOW)] == [pytest.approx(3.0), pytest.approx(6.0)]


def test_groups_are_reported_with_the_shares_of_each():
    plan = measure(plan_of(batch="fixed"), 1, 1, 3, 3)
    event = groups_event(plan.shares(FAST_AND_SLOW), "speeds")
    fast, slow = event["groups"]
    assert event["reason"] == "speeds"
    assert (fast["members"], slow["members"]) == ([0, 1], [2, 3])
    assert (fast["rows"], slow["rows"]) == ([32, 32], [32, 32])
    assert (fast["step_s"], slow["step_s"]) == (1.0, 3.0)
    assert (fast["staleness"], slow["staleness"]) == (0.333, 3.0)
    assert (fast["rate"], slow["rate"]) == (1.0, 0.5)


def test_a_group_is_named_by_its_members():
    assert name_of((0, 1, 12)) == "0,1,12"


# ---- several machines

TWO_MACHINES = ("a", "b", "a", "b")
SIZE = 10_000_000
BY_MACHINE = ((0, 2), (1, 3))


def network_of(mbit: float, machines: tuple[str, ...] = TWO_MACHINES) -> RingNetwork:
    return RingNetwork(machines, SIZE, between=RingLink(0.0005, 8e-6 / mbit))


@pytest.mark.parametrize("groups", ["auto", "2"])
def test_equally_fast_members_of_one_machine_form_a_group(groups):
    plan = measure(plan_of(network=network_of(200), groups=groups), 0.1, 0.1, 0.1, 0.1)
    assert plan.choose(ALL) == BY_MACHINE


def test_speed_decides_before_machines():
    plan = measure(plan_of(network=network_of(1000)), 1, 1, 4, 4)
    assert plan.choose(ALL) == FAST_AND_SLOW


@given(st.lists(st.sampled_from([0.1, 0.11, 0.4, 0.9]), min_size=4, max_size=4))
def test_members_of_one_machine_or_of_unknown_ones_are_grouped_by_speed_alone(seconds):
    found = {
        measure(plan_of(network=network), *seconds).choose(ALL)
        for network in (None, network_of(1, ("a",) * 4), network_of(1, ("", "", "", "")))
    }
    assert len(found) == 1


def test_a_ring_that_has_been_timed_decides_whether_groups_span_machines():
    plan = measure(plan_of(network=network_of(100_000)), 0.1, 0.1, 0.1, 0.1)
    assert len(plan.choose(ALL)) == 1
    plan.settle(ALL)
    plan.ring_measured((0, 1, 2, 3), {"gradient": SIZE, "bytes": SIZE, "seconds": 1.0})
    assert plan.network.allreduce_s((0, 1)) > 0.3
    assert plan.choose(ALL) == BY_MACHINE


def test_the_bytes_of_a_gradient_are_those_that_a_group_reports():
    plan = measure(plan_of(network=RingNetwork(TWO_MACHINES)), 0.1, 0.1, 0.1, 0.1)
    assert plan.choose(ALL) == ((0, 2, 1, 3),)  # nothing to exchange
    plan.ring_measured((0, 2), {"gradient": 40 * SIZE, "bytes": SIZE, "seconds": 0.02})
    assert plan.choose(ALL) == BY_MACHINE
