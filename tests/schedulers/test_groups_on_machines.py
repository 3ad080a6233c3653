"""Groups of workers on several machines: the exchange inside a machine is cheaper, and speed comes first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nfdt.schedulers.grouping import SPREAD, choose, divide, pays, predicted_cost
from nfdt.schedulers.ring_network import ONE_MACHINE, RingLink, RingNetwork

SECONDS = st.floats(0.01, 10)
LINKS = st.builds(RingLink, st.floats(0, 0.01), st.floats(0, 1e-6))
SIZE = 10_000_000


@st.composite
def clusters(draw, machines=("a", "b", "c"), least=1):
    """Draw the seconds of a few workers and their network."""
    count = draw(st.integers(least, 9))
    seconds = draw(st.lists(SECONDS, min_size=count, max_size=count))
    names = draw(st.lists(st.sampled_from(machines), min_size=count, max_size=count))
    return seconds, RingNetwork(tuple(names), draw(st.integers(0, SIZE)), between=draw(LINKS))


def members(groups):
    return sorted(itertools.chain.from_iterable(groups))


def described(groups, seconds, network):
    """Return the groups without the numbers of their workers."""
    return sorted(sorted((seconds[w], network.machine(w)) for w in group) for group in groups)


@given(clusters(machines=("a", "b", "")), st.data())
def test_every_worker_is_in_exactly_one_group(cluster, data):
    seconds, network = cluster
    everyone = list(range(len(seconds)))
    assert members(choose(seconds, network=network)) == everyone
    count = data.draw(st.integers(1, len(seconds)))
    found = divide(seconds, count, network)
    assert (members(found), len(found)) == (everyone, count)
    assert all(found)


@given(clusters(machines=("a",)), st.data())
def test_on_one_machine_groups_are_those_of_workers_without_machines(cluster, data):
    seconds, network = cluster
    count = data.draw(st.integers(1, len(seconds)))
    assert choose(seconds, network=network) == choose(seconds)
    assert divide(seconds, count, network) == divide(seconds, count)


@given(clusters())
def test_no_other_number_of_tight_groups_costs_less(cluster):
    seconds, network = cluster
    cost = predicted_cost(choose(seconds, network=network), seconds, network=network)
    assert cost <= predicted_cost(choose(seconds), seconds, network=network) * (1 + 1e-9)
    assert cost <= predicted_cost((tuple(range(len(seconds))),), seconds, network=network) * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(), st.data())
def test_equally_fast_workers_of_two_machines_do_not_mix_in_two_groups_or_more(first, second, random, data):
    names = ["a"] * first + ["b"] * second
    random.shuffle(names)
    network = RingNetwork(tuple(names), SIZE)
    count = data.draw(st.integers(2, first + second))
    assert not any(map(network.spans, divide([1.0] * len(names), count, network)))


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(), SECONDS, st.integers(0, 10 * SIZE))
def test_one_ring_spans_two_machines_only_where_that_costs_less_than_staleness(first, second, random, step_s, size):
    names = ["a"] * first + ["b"] * second
    random.shuffle(names)
    network = RingNetwork(tuple(names), size)
    found = choose([step_s] * len(names), network=network)
    crossing_s, staleness_s = network.crossing_s(len(names)), SPREAD / 2 * step_s
    if crossing_s != pytest.approx(staleness_s):
        assert [network.spans(group) for group in found] == ([True] if crossing_s < staleness_s else [False, False])


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(), st.integers(1, SIZE))
def test_of_very_unequal_speeds_none_wait_for_another(fast, slow, random, size):
    workers = [(1.0, "a"), (1.0, "b")] * fast + [(20.0, "a"), (20.0, "b")] * slow
    random.shuffle(workers)
    seconds, names = zip(*workers, strict=True)
    for group in choose(seconds, network=RingNetwork(names, size)):
        assert len({seconds[worker] for worker in group}) == 1


@given(clusters(), st.randoms(), st.data())
def test_the_numbers_of_the_workers_do_not_matter(cluster, random, data):
    seconds, network = cluster
    order = list(range(len(seconds)))
    random.shuffle(order)
    there = [seconds[worker] for worker in order]
    also = RingNetwork(tuple(network.machines[w] for w in order), network.size, between=network.between)
    count = data.draw(st.integers(1, len(seconds)))
    assert described(choose(seconds, network=network), seconds, network) == described(
        choose(there, network=also), there, also
    )
    assert described(divide(seconds, count, network), seconds, network) == described(
        divide(there, count, also), there, also
    )


@given(clusters())
def test_members_of_a_machine_have_neighbouring_ranks(cluster):
    seconds, network = cluster
    for group in choose(seconds, network=network):
        names = [network.machine(worker) for worker in group]
        assert len(list(itertools.groupby(names))) == len(set(names))


def test_a_slow_link_divides_and_a_fast_one_joins():
    names = ("a", "b", "a", "b")
    for mbit, groups in ((200, ((0, 2), (1, 3))), (100_000, ((0, 2, 1, 3),))):
        network = RingNetwork(names, SIZE, between=RingLink(0.0005, 8e-6 / mbit))
        assert choose([0.1] * 4, network=network) == groups


def test_machines_of_one_worker_each_form_rings_where_links_are_fast():
    network = RingNetwork(tuple("abcd"), 400_000, between=RingLink(0.0005, 8e-6 / 1000))
    assert choose([0.1, 0.1, 0.4, 0.4], network=network) == ((0, 1), (2, 3))
    assert choose([0.001] * 4, network=network) == ((0,), (1,), (2,), (3,))


def test_a_change_of_groups_pays_by_what_the_exchange_between_machines_takes():
    now, then, seconds = ((0, 1, 2, 3),), ((0, 2), (1, 3)), [0.1] * 4
    network = RingNetwork(("a", "b", "a", "b"), SIZE, between=RingLink(0.0005, 8e-6 / 200))
    assert pays(now, then, seconds, 100, 10, network)
    assert not pays(now, then, seconds, 100, 10)


@given(st.integers(2, 16), st.integers(0, SIZE), LINKS)
def test_an_allreduce_takes_the_steps_of_a_ring(ranks, size, link):
    expected = 2 * (ranks - 1) * link.latency_s + 2 * (ranks - 1) / ranks * size * link.s_per_byte
    assert link.allreduce_s(ranks, size) == pytest.approx(expected)


@given(LINKS.filter(lambda link: link.latency_s > 1e-5 and link.s_per_byte > 1e-10))
def test_a_fit_finds_the_link_that_was_measured(link):
    measured = [(n, size, link.allreduce_s(n, size)) for n in (2, 3, 4) for size in (10**6, 10**7, 4 * 10**7)]
    found = RingLink.fitted(measured)
    assert found.s_per_byte == pytest.approx(link.s_per_byte, rel=1e-6)
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(("ring", "kept"), [((0, 1), "local"), ((0, 2), "between")])
def test_a_measured_ring_sets_the_links_of_its_kind(ring, kept):
    network = RingNetwork(("a", "a", "b"), SIZE)
    found = network.measured(ring, SIZE, 0.5)
    assert found.allreduce_s(ring) == pytest.approx(0.5)
    assert network.measured(ring, SIZE // 2, 0.5).allreduce_s(ring) > 0.5
    other = {"local": "between", "between": "local"}[kept]
    assert getattr(found, other) == getattr(network, other)
    assert network.measured((0,), SIZE, 0.5) == network
    assert network.measured(ring, SIZE, 0.0) == network
    free = RingNetwork(("a", "b"), between=RingLink(0.0, 0.0))
    assert free.measured((0, 1), SIZE, 0.5) == free


def test_a_worker_of_unknown_machine_counts_as_near():
    network = RingNetwork(("a", "", "b"), SIZE)
    assert not network.spans((0, 1))
    assert network.spans((0, 1, 2))
    assert network.machine(7) == ""
    assert network.allreduce_s((0, 1)) == ONE_MACHINE.allreduce_s(2, SIZE)
    assert network.extra_s((0, 1)) == 0.0
