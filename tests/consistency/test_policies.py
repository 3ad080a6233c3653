"""Decisions of each consistency policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.consistency.policies import Barrier, BoundedStaleness, Free, Softsync


def running(policy, *workers):
    for worker in workers:
        policy.joined(worker)
    return policy


def steps(policy, worker, count):
    for _ in range(count):
        assert policy.may_start(worker)
        policy.started(worker)
        policy.finished(worker)


def test_bounded_staleness_blocks_a_worker_more_than_s_steps_ahead():
    policy = running(BoundedStaleness(2), "fast", "slow")
    steps(policy, "fast", 3)
    assert not policy.may_start("fast")
    assert policy.waiting_for("fast") == ("slow",)
    steps(policy, "slow", 1)
    assert policy.may_start("fast")
    assert policy.waiting_for("fast") == ()


def test_a_bound_of_zero_is_lock_step():
    policy = running(BoundedStaleness(0), "a", "b")
    steps(policy, "a", 1)
    assert not policy.may_start("a")
    steps(policy, "b", 1)
    assert policy.may_start("a")


def test_a_step_that_is_not_finished_does_not_count():
    policy = running(BoundedStaleness(0), "a", "b")
    policy.started("a")
    assert policy.may_start("b")
    steps(policy, "b", 1)
    assert policy.waiting_for("b") == ("a",)


def test_steps_that_a_worker_overlaps_count_for_it():
    policy = running(BoundedStaleness(2), "fast", "slow")
    steps(policy, "fast", 1)
    assert policy.may_start("fast", in_flight=1)
    assert not policy.may_start("fast", in_flight=2)
    assert policy.waiting_for("fast", in_flight=2) == ("slow",)
    steps(policy, "slow", 1)
    assert policy.may_start("fast", in_flight=2)


@pytest.mark.parametrize("event", ["left", "idle"])
def test_a_worker_that_is_gone_or_idle_blocks_no_other(event):
    policy = running(BoundedStaleness(0), "a", "b")
    steps(policy, "a", 1)
    getattr(policy, event)("b")
    steps(policy, "a", 10)


def test_a_worker_that_comes_back_blocks_no_other():
    policy = running(BoundedStaleness(1), "a", "b")
    policy.idle("b")
    steps(policy, "a", 10)
    steps(policy, "b", 1)
    assert policy.may_start("a")
    steps(policy, "b", 1)
    assert not policy.may_start("b")


def test_a_worker_that_comes_back_is_as_far_ahead_as_it_was():
    policy = running(BoundedStaleness(1), "a", "b")
    steps(policy, "a", 2)
    policy.idle("a")
    assert policy.waiting_for("a") == ("b",)
    steps(policy, "b", 1)
    steps(policy, "a", 1)
    assert policy.waiting_for("a") == ("b",)


def test_the_steps_of_a_worker_that_came_back_count_for_the_others():
    policy = running(BoundedStaleness(0), "a", "b")
    policy.idle("b")
    steps(policy, "a", 1)
    steps(policy, "b", 1)
    steps(policy, "a", 1)
    assert policy.may_start("a")


def test_what_a_worker_finishes_while_it_is_idle_counts():
    policy = running(BoundedStaleness(1), "a", "b")
    policy.started("a", 2)
    policy.idle("a")
    policy.finished("a", 2)
    assert policy.waiting_for("a") == ("b",)


def test_several_tasks_of_a_report_are_several_steps():
    policy = running(BoundedStaleness(2), "a", "b")
    policy.started("a", 3)
    policy.finished("a", 3)
    assert policy.waiting_for("a") == ("b",)


def test_all_workers_start_anew_once_none_is_active():
    policy = running(BoundedStaleness(1), "a", "b")
    steps(policy, "a", 2)
    policy.idle("a")
    policy.idle("b")
    policy.started("b")
    steps(policy, "a", 2)


def test_a_late_worker_starts_level_with_the_slowest():
    policy = running(BoundedStaleness(1), "a", "b")
    for name in "abababb":
        steps(policy, name, 1)
    policy.joined("late")
    steps(policy, "b", 1)
    steps(policy, "a", 1)
    assert policy.waiting_for("b") == ("late",)


def test_a_worker_pulls_where_the_answer_to_its_last_push_may_lack_what_the_bound_promises():
    policy = running(BoundedStaleness(1), "a", "b")
    assert policy.must_pull("a")
    steps(policy, "a", 1)
    assert not policy.must_pull("a")
    steps(policy, "a", 1)
    steps(policy, "b", 1)
    assert policy.may_start("a")
    assert policy.must_pull("a")


def test_what_has_been_seen_is_that_of_the_push_whose_answer_is_held():
    policy = running(BoundedStaleness(1), "a", "b")
    policy.started("a")
    steps(policy, "b", 2)
    policy.started("a")
    policy.finished("a")
    assert policy.must_pull("a", in_flight=1)
    policy.finished("a")
    assert not policy.must_pull("a")


def test_of_several_pushes_the_one_before_those_on_their_way_counts():
    policy = running(BoundedStaleness(2), "a", "b")
    steps(policy, "a", 1)
    for _ in range(2):  # b has done one step when the second of a starts, and two at the third
        steps(policy, "b", 1)
        steps(policy, "a", 1)
    policy.started("a")
    assert not policy.must_pull("a", in_flight=1)


def test_an_answer_that_will_be_too_old_is_known_when_its_step_starts():
    policy = running(BoundedStaleness(1), "a", "b")
    policy.started("a")
    assert not policy.will_pull("a")
    policy.finished("a")
    policy.started("a")
    assert policy.will_pull("a")


def test_of_two_overlapping_steps_the_second_answer_is_too_old_first():
    policy = running(BoundedStaleness(2), "a", "b")
    policy.started("a")
    policy.started("a")
    assert not policy.will_pull("a", in_flight=1)
    policy.started("a")
    assert policy.will_pull("a", in_flight=2)


def test_one_worker_alone_never_pulls_again():
    policy = running(BoundedStaleness(0), "a")
    policy.started("a")
    assert not policy.will_pull("a")
    policy.finished("a")
    assert not policy.must_pull("a")


def test_no_worker_has_seen_the_steps_of_a_new_one():
    policy = running(BoundedStaleness(0), "a", "b")
    steps(policy, "b", 1)
    policy.started("a")
    policy.joined("late")
    policy.finished("a")
    assert policy.must_pull("a")


@given(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=200))
def test_finished_steps_never_differ_by_more_than_the_bound_and_one(bound, turns):
    names = [f"w{i}" for i in range(4)]
    policy = running(BoundedStaleness(bound), *names)
    done = dict.fromkeys(names, 0)
    for turn in turns:
        if policy.may_start(names[turn]):
            steps(policy, names[turn], 1)
            done[names[turn]] += 1
    assert max(done.values()) - min(done.values()) <= bound + 1


@given(
    st.integers(0, 2),
    st.lists(
        st.tuples(st.sampled_from(["joined", "left", "started", "finished", "idle"]), st.integers(0, 3)), max_size=80
    ),
)
def test_the_slowest_worker_is_known_without_looking_at_all(bound, events):
    policy, steps, active = BoundedStaleness(bound), {}, set()

    def level(name):
        slowest = min((steps[w] for w in active), default=steps[name])
        return steps[name] if name in active else max(steps[name], slowest)

    for kind, number in events:
        name = f"w{number}"
        getattr(policy, kind)(name)
        if kind in ("joined", "left", "idle"):
            if active == {name}:
                steps = dict.fromkeys(steps, 0)
            active.discard(name)
        if kind in ("joined", "left"):
            steps.pop(name, None)
        if kind in ("joined", "started"):
            steps[name] = level(name) if name in steps else min((steps[w] for w in active), default=0)
            active.add(name)
        elif kind == "finished" and name in steps:
            steps[name] += 1
        for worker in ("w0", "w1", "w2", "w3"):
            free = worker not in steps or not active or level(worker) - min(steps[w] for w in active) <= bound
            assert policy.may_start(worker) == free


def test_a_synchronous_round_has_a_part_per_worker():
    assert [Barrier().round_parts(m) for m in (0, 1, 4)] == [1, 1, 4]
    assert Free().round_parts(4) == Softsync(2).round_parts(4) == BoundedStaleness(1).round_parts(4) == 1


@pytest.mark.parametrize(("workers", "n", "count"), [(8, 1, 8), (8, 3, 2), (8, 8, 1), (4, 9, 1), (1, 1, 1)])
def test_softsync_merges_floor_of_workers_over_n(workers, n, count):
    assert Softsync(n).merge_count(workers) == count


@pytest.mark.parametrize("policy", [Free(), Barrier(), Softsync(2)], ids=lambda policy: policy.name)
def test_without_a_bound_no_worker_has_to_pull(policy):
    steps(running(policy, "a", "b"), "a", 5)
    assert not policy.must_pull("a", in_flight=1)
    assert not policy.will_pull("a", in_flight=1)


def test_the_others_apply_every_gradient_on_its_own():
    assert Free().merge_count(8) == Barrier().merge_count(8) == BoundedStaleness(1).merge_count(8) == 1


def test_a_worker_of_whole_rounds_gets_all_parts_of_one_at_once():
    policy = Barrier(parts=4)
    assert policy.round_parts(1) == policy.lease_limit == 4
