"""Promises of every consistency policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.consistency import POLICIES, make_policy
from nfdt.core.specs.job import resolve_algorithm
from nfdt.core.specs.presets import AXES

EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "start", "finish", "idle"]), st.integers(0, 4)), max_size=60
)


def policy_of(name, **overrides):
    return make_policy(resolve_algorithm("asgd", consistency=name, **overrides))


def driven(policy, events):
    """Play events as a coordinator would, possible ones only; returns (present, idle, holding)."""
    present, idle, holding = set(), set(), set()
    for kind, worker in events:
        name = f"w{worker}"
        if kind == "join" and name not in present:
            policy.joined(name)
            present.add(name)
        elif kind == "leave":
            policy.left(name)
            for group in (present, idle, holding):
                group.discard(name)
        elif kind == "start" and name in present - holding and policy.may_start(name):
            policy.started(name)
            holding.add(name)
            idle.discard(name)
        elif kind == "finish" and name in holding:
            policy.finished(name)
            holding.discard(name)
        elif kind == "idle" and name in present - holding:
            policy.idle(name)
            idle.add(name)
    return present, idle, holding


def test_every_policy_of_the_preset_axis_exists():
    assert set(POLICIES) == set(AXES["consistency"])


@pytest.mark.parametrize("name", POLICIES)
def test_the_name_is_the_one_it_is_asked_for_by(name):
    assert policy_of(name).name == name


@pytest.mark.parametrize("name", POLICIES)
@given(events=EVENTS)
def test_some_worker_can_always_proceed(name, events):
    policy = policy_of(name)
    present, _, holding = driven(policy, events)
    if present and not holding:
        assert any(policy.may_start(w) for w in present)


@pytest.mark.parametrize("name", POLICIES)
@given(events=EVENTS)
def test_a_worker_that_must_wait_waits_for_another_that_is_present_and_may_move(name, events):
    policy = policy_of(name)
    present, idle, holding = driven(policy, events)
    for worker in present:
        waits_for = policy.waiting_for(worker)
        assert bool(waits_for) == (not policy.may_start(worker))
        assert worker not in waits_for
        assert set(waits_for) <= present - idle


@pytest.mark.parametrize("name", POLICIES)
@given(events=EVENTS)
def test_an_answer_without_use_is_followed_by_a_pull(name, events):
    policy = policy_of(name)
    present, _, holding = driven(policy, events)
    for worker in holding:
        useless = policy.will_pull(worker)
        policy.finished(worker)
        assert policy.must_pull(worker) >= useless


@pytest.mark.parametrize("name", POLICIES)
@given(events=EVENTS)
def test_every_worker_may_start_once_the_others_are_gone(name, events):
    policy = policy_of(name)
    present, _, _ = driven(policy, events)
    for worker in sorted(present)[1:]:
        policy.left(worker)
    assert all(policy.may_start(w) for w in sorted(present)[:1])


@pytest.mark.parametrize("name", POLICIES)
def test_losing_an_unknown_worker_is_no_error(name):
    policy = policy_of(name)
    policy.left("unknown")
    policy.idle("unknown")
    policy.finished("unknown")
    assert policy.may_start("unknown")
    assert not policy.will_pull("unknown")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("workers", [0, 1, 2, 7, 100])
def test_rounds_and_merges_are_at_least_one_batch(name, workers):
    policy = policy_of(name, softsync_n=3)
    assert policy.round_parts(workers) >= 1
    assert policy.merge_count(workers) >= 1
    assert policy.lease_limit in (None, 1)
