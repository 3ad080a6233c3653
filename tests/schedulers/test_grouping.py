"""Groups of workers: optimal, stable, and changed only for a sufficient gain."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.grouping import LOOKS, Hysteresis, choose, cluster, divide, evenly, pays, predicted_cost

SECONDS = st.lists(st.floats(0.01, 10, allow_nan=False), min_size=1, max_size=8)
BENCH = [1, 1, 1, 1, 2, 2, 5, 5]


def partitions(items):
    """Yield all partitions of a list into sets."""
    if not items:
        yield []
        return
    head, *rest = items
    for partition in partitions(rest):
        yield [[head], *partition]
        for i, group in enumerate(partition):
            yield [*partition[:i], [head, *group], *partition[i + 1 :]]


def intervals(seconds, groups):
    """Yield all partitions of the sorted workers into so many intervals."""
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    for borders in itertools.combinations(range(1, len(order)), groups - 1):
        cuts = [0, *borders, len(order)]
        yield [order[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]


def spread_cost(groups, seconds):
    return sum(len(g) * math.log(max(seconds[i] for i in g) / min(seconds[i] for i in g)) for g in groups)


def fits(group, seconds, spread):
    return max(seconds[i] for i in group) <= (1 + spread) * min(seconds[i] for i in group)


def all_members(groups):
    return sorted(itertools.chain.from_iterable(groups))


@given(seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=7), spread=st.floats(0, 2))
def test_no_partition_into_sets_of_that_spread_has_fewer_groups(seconds, spread):
    found = cluster(seconds, spread)
    assert all_members(found) == list(range(len(seconds)))
    assert all(fits(group, seconds, spread) for group in found)
    fewest = min(len(p) for p in partitions(list(range(len(seconds)))) if all(fits(g, seconds, spread) for g in p))
    assert len(found) == fewest


@given(seconds=SECONDS, data=st.data())
def test_no_cut_into_as_many_intervals_is_tighter(seconds, data):
    count = data.draw(st.integers(1, len(seconds)))
    found = divide(seconds, count)
    assert all_members(found) == list(range(len(seconds)))
    assert len(found) == count
    assert all(found)
    best = min(spread_cost(cut, seconds) for cut in intervals(seconds, count))
    assert spread_cost(found, seconds) == pytest.approx(best, abs=1e-9)


@given(seconds=SECONDS, spread=st.floats(0, 2))
def test_the_chosen_groups_cost_least_among_the_tightest_of_each_number(seconds, spread):
    found = choose(seconds, spread)
    most = len(cluster(seconds, spread))
    costs = [predicted_cost(divide(seconds, count), seconds, spread) for count in range(1, most + 1)]
    assert predicted_cost(found, seconds, spread) == min(costs)


@given(seconds=SECONDS, factor=st.floats(0.1, 10))
def test_only_relative_speeds_count(seconds, factor):
    assert cluster([1, 1, 4, 4]) == cluster([factor * s for s in (1, 1, 4, 4)])
    costs = [predicted_cost(choose([factor * s for s in seconds]), seconds), predicted_cost(choose(seconds), seconds)]
    assert costs[0] == pytest.approx(costs[1])


@pytest.mark.parametrize(
    ("seconds", "groups"),
    [
        ([1, 1, 1, 1], ((0, 1, 2, 3),)),
        ([1, 1, 4, 4], ((0, 1), (2, 3))),
        ([4, 1, 4, 1], ((1, 3), (0, 2))),
        (BENCH, ((0, 1, 2, 3), (4, 5), (6, 7))),
        ([1, 1.1], ((0, 1),)),
        ([1, 1.4], ((0,), (1,))),
    ],
)
def test_the_number_of_groups_that_one_expects_is_chosen(seconds, groups):
    assert choose(seconds) == groups
    assert cluster(seconds) == groups


def test_a_smaller_spread_makes_more_groups():
    assert choose([1, 1.2], spread=0.25) == ((0, 1),)
    assert choose([1, 1.2], spread=0.1) == ((0,), (1,))


def test_two_machines_of_the_greatest_spread_are_as_good_together_as_apart():
    together, apart = predicted_cost(((0, 1),), [1, 1.25]), predicted_cost(((0,), (1,)), [1, 1.25])
    assert together == pytest.approx(apart)


def test_no_spread_means_groups_of_one_and_a_great_one_a_single_ring():
    assert cluster([1, 2, 3], 0) == ((0,), (1,), (2,))
    assert cluster([1, 2, 3], math.inf) == ((0, 1, 2),)


def looks(*rounds):
    hysteresis = Hysteresis(((0, 1), (2, 3)), [1.0, 1.1, 4.0, 4.0])
    return [hysteresis.look(dict(enumerate(seconds))) for seconds in rounds]


@pytest.mark.parametrize("seconds", [0.7, 1.4, 4])
def test_a_worker_that_leaves_its_band_is_noticed_after_some_looks_in_a_row(seconds):
    slow = (1, seconds, 4, 4)
    assert looks(*[slow] * (LOOKS + 1)) == [False] * (LOOKS - 1) + [True] * 2
    assert looks(slow, (1, 1.1, 4, 4), slow) == [False] * 3


@given(jitter=st.lists(st.floats(0.95, 1.05), min_size=4, max_size=4), load=st.floats(0.1, 10))
def test_jitter_within_the_band_and_load_on_all_change_nothing(jitter, load):
    seconds = [load * j * s for j, s in zip(jitter, (1.05, 1.05, 4.0, 4.0), strict=True)]
    assert not any(looks(seconds, seconds, seconds))


def test_workers_that_are_gone_are_left_out():
    hysteresis = Hysteresis(((0, 1), (2, 3)), [1.0, 1.0, 4.0, 4.0])
    assert not any(hysteresis.look({2: 8.0, 3: 8.0}) for _ in range(LOOKS + 1))
    assert not any(hysteresis.look({2: 8.0}) for _ in range(LOOKS + 1))


def test_a_change_has_to_save_more_time_than_it_costs():
    now, then, seconds = ((0, 1, 2, 3),), ((0, 1), (2, 3)), [1, 1, 4, 4]
    assert pays(now, then, seconds, remaining_s=100, cost_s=50)
    assert not pays(now, then, seconds, remaining_s=10, cost_s=50)
    assert not pays(now, now, seconds, remaining_s=1e9, cost_s=0)


def test_what_a_change_saves_is_its_share_of_the_cost_per_batch():
    now, then, seconds = ((0, 1, 2, 3),), ((0, 1), (2, 3)), [0.5, 0.5, 2, 2]
    saved_s = 100 * (1 - predicted_cost(then, seconds) / predicted_cost(now, seconds))
    assert pays(now, then, seconds, remaining_s=100, cost_s=0.99 * saved_s)
    assert not pays(now, then, seconds, remaining_s=100, cost_s=1.01 * saved_s)


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12), st.data())
def test_even_groups_hold_neighbours_and_differ_by_one_worker_at_most(seconds, data):
    count = data.draw(st.integers(1, len(seconds)))
    groups = evenly(seconds, count)
    assert sorted(worker for group in groups for worker in group) == list(range(len(seconds)))
    sizes = [len(group) for group in groups]
    assert len(groups) == count
    assert max(sizes) - min(sizes) <= 1
    for faster, slower in zip(groups, groups[1:], strict=False):
        assert max(seconds[worker] for worker in faster) <= min(seconds[worker] for worker in slower)


def test_of_equally_good_groupings_the_one_with_fewer_groups_is_chosen():
    seconds = [1.0, 1.25, 1.25, 1.5]
    halves = divide(seconds, 2)
    assert predicted_cost(halves, seconds) == predicted_cost(((0, 1, 2, 3),), seconds)
    assert choose(seconds) == ((0, 1, 2, 3),)


def test_equally_fast_workers_are_taken_in_their_order():
    assert evenly({3: 1.0, 1: 1.0, 2: 1.0, 0: 1.0}, 2) == ((0, 1), (2, 3))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_worker_counts_that_has_become_faster_or_slower(factor):
    hysteresis = Hysteresis(((0, 1, 2, 3),), [1.0] * 4)
    looks = [hysteresis.look({0: factor, 1: 1.0, 2: 1.0, 3: 1.0}) for _ in range(LOOKS)]
    assert looks == [False] * (LOOKS - 1) + [True]


def test_a_worker_counts_that_is_faster_than_its_group_ever_was():
    hysteresis = Hysteresis(((0,), (1, 2, 3, 4, 5, 6, 7, 8, 9)), [1.0] + [2.0] * 9)
    faster = {0: 0.8, **dict.fromkeys(range(1, 10), 2.0)}  # hardly moves the mean, so no other worker is slower
    assert [hysteresis.look(faster) for _ in range(LOOKS)][-1]
