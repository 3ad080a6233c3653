"""Pushes with non-finite results: refused as a whole, counted, and without effect."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest

from nfdt.core.arrays.layout import ParameterLayout
from nfdt.model.program.state import State
from nfdt.shard.buffers import length_of
from nfdt.shard.building import build_store
from nfdt.shard.engine import LARGE
from nfdt.shard.messages import Gradient
from nfdt.shard.modes import MergedMode, RoundMode
from nfdt.shard.sparse_store import SparseStore
from tests.support.shard_cluster import LAYOUT, Cluster, Reference, gradients, rule_spec, start_weights

RATE = 0.1
HUGE = np.full(LAYOUT.size, 3e38, np.float32)  # every element is finite, and the square of none is


def cluster(rule="plain", optimizer=None, **options):
    return Cluster(Reference(optimizer or keras.optimizers.SGD(RATE, momentum=0.9)), rule=rule, **options)


@pytest.mark.parametrize("value", [3.0, 1e18, -1e18])
def test_the_length_of_a_gradient_is_its_norm(value):
    vector = np.array([value, 0, 4 * abs(value) / 3], np.float32)
    np.testing.assert_allclose(length_of(vector), 5 / 3 * abs(value), rtol=1e-6)


@pytest.mark.parametrize("values", [[np.nan, 0], [np.inf, 0], [np.inf, -np.inf], [3e38, 0], [1.5e19, 1.5e19]])
def test_no_length_is_finite_that_a_square_cannot_be_taken_of(values):
    assert not np.isfinite(length_of(np.array(values, np.float32)))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Lion"])
@pytest.mark.parametrize("rule", ["plain", "dc-a", "ddc"])
def test_a_huge_gradient_changes_nothing(rule, optimizer):
    c, clean = (cluster(rule, getattr(keras.optimizers, optimizer)(0.01)) for _ in range(2))
    c.pull(), clean.pull()
    answer = c.push(HUGE)[0]
    assert (answer.applied, answer.version) == (False, 0)
    assert np.array_equal(answer.weights, start_weights())
    for g in gradients(3):
        assert np.array_equal(c.push(g)[0].weights, clean.push(g)[0].weights)
    assert c.stores[0].statistics()["workers"]["w"]["dropped"] == 1


@pytest.mark.parametrize("rule", ["plain", "dc-a", "ddc"])
def test_a_step_that_overflows_is_taken_back_with_all_it_moved(rule):
    """Case: a gradient so long that weights become infinite at this rate. Momentum and rule are restored."""
    c, clean = (cluster(rule, keras.optimizers.SGD(1e25, momentum=0.9)) for _ in range(2))
    for each in (c, clean):
        each.pull("a"), each.pull("b")
        each.push(1e-26 * gradients(1)[0], "a")
    before = c.state
    assert not c.push(np.full(LAYOUT.size, 1e15, np.float32), "b")[0].applied
    clean.push(np.full(LAYOUT.size, np.nan, np.float32), "b")  # is refused before the update
    assert all(np.array_equal(c.state[index], value) for index, value in before.items())
    for name, g in zip("bab", gradients(3), strict=True):
        found, wanted = (each.push(1e-26 * g, name)[0] for each in (c, clean))
        assert (found.applied, found.staleness) == (True, wanted.staleness)
        assert np.array_equal(found.weights, wanted.weights)


def test_a_long_gradient_that_does_no_harm_is_applied():
    c = cluster(optimizer=keras.optimizers.SGD(1e-9))
    g = np.float32(1e9) * gradients(1)[0]
    assert length_of(g) > LARGE
    c.pull()
    assert c.push(g)[0].applied
    np.testing.assert_allclose(c.weights, start_weights() - 1e-9 * g, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("bad", [np.float32(np.nan), np.float32(3e38)])
def test_one_part_of_a_round_does_not_spoil_the_others(bad):
    c = cluster(optimizer=keras.optimizers.SGD(RATE), mode=RoundMode)
    g = gradients(1)[0]
    assert not c.push(np.full_like(g, bad), "a", round=1, part=0, parts=2, want_weights=False)[0].applied
    assert c.push(g, "b", round=1, part=1, parts=2, want_weights=False)[0].version == 1
    np.testing.assert_allclose(c.weights, start_weights() - RATE * g, rtol=2e-5, atol=2e-6)


def test_an_overflowing_round_is_refused_and_the_next_one_applied():
    c = cluster(optimizer=keras.optimizers.SGD(1e25), mode=RoundMode)
    long, g = np.full(LAYOUT.size, 1e15, np.float32), 1e-26 * gradients(1)[0]
    c.push(long, "a", round=1, part=0, parts=2, want_weights=False)
    last = c.push(long, "b", round=1, part=1, parts=2, want_weights=False)[0]
    assert (last.applied, last.version) == (False, 0)
    assert np.array_equal(c.weights, start_weights())
    assert not c.push(g, "a", round=1, part=0, parts=2, want_weights=False)[0].applied  # the round is closed
    assert c.push(g, "a", round=2, part=0, parts=1, want_weights=False)[0].version == 1
    np.testing.assert_allclose(c.weights, start_weights() - 1e25 * g, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("flushed", [False, True])
def test_an_overflowing_merge_is_refused_and_the_next_one_applied(flushed):
    c = cluster(optimizer=keras.optimizers.SGD(1e25), mode=partial(MergedMode, count=3 if flushed else 2))
    c.pull("a"), c.pull("b")
    long, g = np.full(LAYOUT.size, 1e15, np.float32), 1e-26 * gradients(1)[0]
    assert [c.push(long, name)[0].applied for name in "ab"] == [True, flushed]
    assert c.stores[0].flush() == 0
    assert np.array_equal(c.weights, start_weights())
    c.push(g, "a"), c.push(g, "b")
    assert c.stores[0].flush() == 1
    np.testing.assert_allclose(c.weights, start_weights() - 1e25 * g, rtol=2e-5, atol=2e-6)


TABLE = ParameterLayout.of([("table", (1030, 64)), ("bias", (4,))])


def store_with_a_table(rate, rule="plain", **options):
    reference = Reference(keras.optimizers.SGD(rate), layout=TABLE)
    manifest = reference.manifest().replaced(tables=[0])
    store = build_store(
        manifest, State(reference.weights, reference.state), rule_spec(rule, **options), 0, 1, workers=1
    )
    assert isinstance(store, SparseStore)
    store.pull("a", sequence=1)
    return store


@pytest.mark.parametrize("rule", ["plain", "dc-a", "ddc"])
def test_rows_that_would_overflow_refuse_the_whole_push(rule):
    store, clean = store_with_a_table(1e10, rule), store_with_a_table(1e10, rule)
    g = np.zeros(TABLE.size, np.float32)
    g[-1], g[64:128] = 1e-10, 1e-10
    overflowing = g.copy()
    overflowing[64] = 3e38
    refused = store.push("a", Gradient(2, overflowing))
    assert (refused.applied, store.version, store.statistics()["dropped"]) == (False, 0, 1)
    assert np.array_equal(store.read()[0], clean.read()[0])
    found, wanted = (each.push("a", Gradient(3, g)) for each in (store, clean))
    assert found.applied
    assert np.array_equal(found.weights, wanted.weights)


def test_rows_of_a_round_that_would_overflow_leave_their_table_as_it_was():
    store = store_with_a_table(1e10, consistency="bsp")
    before = store.read()[0]
    overflowing = np.zeros(TABLE.size, np.float32)
    overflowing[64] = 3e38
    store.push("a", Gradient(2, overflowing, round=1, part=0, parts=1), want_weights=False)
    assert np.array_equal(store.read()[0], before)
